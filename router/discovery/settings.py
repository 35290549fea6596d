"""The flags that say who is in the fleet. Knows names, defaults and bounds; reads nothing."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from radixmesh.settings import ServiceSettings
from router.discovery.lookup import Lookup, Wanted
from router.discovery.member import parse_member


def _split(given: object) -> object:
    """Return the parts of comma-separated text; a list stays as it is, its parts are split."""
    if isinstance(given, str):
        return [part.strip() for part in given.split(",") if part.strip()]
    if isinstance(given, list):
        return [part for whole in given for part in str(whole).split(",") if part]
    return given


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class MemberSettings(ServiceSettings):
    """Who is in the fleet."""

    groups: Names = Field(default_factory=list)
    """Worker groups: HOST:PORT or NAME=HOST:PORT, comma-separated."""
    tokenizers: Names = Field(default_factory=list)
    """Tokenizers: HOST:PORT, comma-separated."""
    detokenizers: Names = Field(default_factory=list)
    """Detokenizers: HOST:PORT, comma-separated."""
    members_file: Path | None = None
    """A YAML or JSON file that lists worker groups, or groups, tokenizers and detokenizers; it is
    read again every second. Broken or empty it changes nothing; [] means none."""
    groups_dns: Names = Field(default_factory=list)
    """Worker groups from the DNS: HOST:PORT for the addresses of a name, say of a headless
    Service, or _SERVICE._PROTO.HOST for SRV records; comma-separated."""
    tokenizers_dns: Names = Field(default_factory=list)
    """Tokenizers from the DNS, as --groups-dns."""
    detokenizers_dns: Names = Field(default_factory=list)
    """Detokenizers from the DNS, as --groups-dns."""
    dns_interval_s: float = Field(5.0, gt=0)
    """Names are looked up so often."""
    groups_service: str = ""
    """Worker groups from Kubernetes: the pods of [NAMESPACE/]SERVICE[:PORT], PORT being a name or
    a number; needs the `kubernetes` extra, and the right to list and watch EndpointSlices."""
    groups_selector: str = ""
    """Worker groups from Kubernetes: the pods of all Services with such labels: KEY=VALUE,..."""
    tokenizers_service: str = ""
    """Tokenizers from Kubernetes, as --groups-service."""
    detokenizers_service: str = ""
    """Detokenizers from Kubernetes, as --groups-service."""
    kubernetes_namespace: str = ""
    """Where Services are that name no namespace; empty is the router's own, * is everywhere."""
    kubernetes_port: str = ""
    """Port of Services that name none, by name or number; empty is the only one that they have."""
    kubernetes_api: str = ""
    """URL of the Kubernetes API; empty is that of the cluster, or else of kubectl."""
    kubernetes_resync_s: float = Field(30.0, gt=0)
    """Everything is listed anew so often, whatever the watch said."""
    leave_grace_s: float = Field(60.0, ge=0)
    """Streams of a group that is listed no more have so long to finish; then they go on
    elsewhere."""

    @field_validator("groups", "tokenizers", "detokenizers")
    @classmethod
    def _addresses(cls, addresses: list[str]) -> list[str]:
        places = [parse_member(address).address for address in addresses]
        if len(set(places)) < len(places):
            raise ValueError("an address is named twice")
        return addresses

    @field_validator("groups_dns", "tokenizers_dns", "detokenizers_dns")
    @classmethod
    def _lookups(cls, names: list[str]) -> list[str]:
        for name in names:
            Lookup.parse(name)
        return names

    @field_validator("groups_service", "tokenizers_service", "detokenizers_service")
    @classmethod
    def _services(cls, service: str) -> str:
        if service:
            Wanted.service(service, namespace="", port="")
        return service

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.groups_service and self.groups_selector:
            raise ValueError("--groups-service and --groups-selector exclude each other")
        return self
