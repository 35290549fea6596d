"""The flags of the router. Knows names, defaults and bounds; reads nothing itself."""

import ipaddress
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import CliSuppress

from radixmesh.settings import SettingsConfigDict
from router.discovery.settings import MemberSettings, Names
from router.policy.policies import POLICIES

MIB = 1 << 20


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TenantLimits(BaseModel):
    """One tenant's limits; what is not given is as for all tenants, 0 means no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_minute: int | None = Field(None, ge=0)
    requests_per_minute: int | None = Field(None, ge=0)


class RouterSettings(MemberSettings):
    """The mesh's front door: routes requests to worker groups, and keeps their streams alive.

    Lists are comma-separated on the command line and lists in the file. Flags of SGLang's gateway
    are understood: --worker-urls grpc://HOST:PORT ... and what goes with it; there --port is the
    HTTP port.
    """

    model_config = SettingsConfigDict(env_prefix="RADIXMESH_ROUTER_")

    policy: str = "price"
    """How a replica is chosen: price, cache_aware, least_load, power_of_two, round_robin, random
    or consistent_hash."""
    cache_threshold: float = Field(0.3, ge=0, le=1)
    """Policy cache_aware: share of a prompt that must be held somewhere to go there for it."""
    balance_abs_threshold: float = Field(64, ge=0)
    """Policy cache_aware: load counts only where the busiest replica has so many requests more than
    the idlest..."""
    balance_rel_threshold: float = Field(1.5, ge=0)
    """Policy cache_aware: ...and more than so many times as many."""
    index_bytes: int = Field(512 * MIB, ge=MIB)
    """Memory for the picture of all prefix caches; the least valuable part goes first."""

    host: str = "127.0.0.1"
    """Address that everything listens on."""
    port: int = Field(30001, ge=0, le=65535)
    """Port of the public gRPC API; 0 takes a free one."""
    http: bool = True
    """Serve OpenAI's HTTP API; needs the `http` extra."""
    http_port: int = Field(30000, ge=0, le=65535)
    """Port of the HTTP API; 0 takes a free one."""
    fleet_port: int = Field(30003, ge=0, le=65535)
    """Port of FleetService, for administrators; 0 takes a free one."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the metrics page; 0 means none (the HTTP port has one too)."""
    metrics_host: str = ""
    """Address that the metrics page listens on; empty is --host."""
    processes: int = Field(1, ge=1, le=256)
    """Routers on this host, each a process with its own ports, links and index. Number i has the
    ports above plus i times --port-step, and every limit for itself."""
    port_step: int = Field(4, ge=1)
    """What the ports of --processes differ by; so much keeps the default ports apart."""
    process_number: CliSuppress[int | None] = Field(None, ge=0)
    """Which of --processes this is; they set it themselves."""
    cors_origins: Names = Field(default_factory=lambda: ["*"])
    """Origins of web pages that may call the HTTP API, comma-separated; all unless given."""

    workers_api: bool = False
    """Serve /workers, /get_loads and /flush_cache on the HTTP port, to whom the API key opens it:
    whoever may call them may take workers out. Other addresses than loopback need --api-key."""

    api_key: str = ""
    """Key that clients must bring as a Bearer token; empty means none."""
    max_concurrent: int = Field(0, ge=0)
    """Requests at once; 0 means no limit."""
    max_queued: int = Field(1024, ge=0)
    """Requests that may wait for one of --max-concurrent; more are refused with QUEUE_FULL."""
    max_concurrent_tokens: int = Field(0, ge=0)
    """Tokens of all running requests, prompts and the most they may generate; 0: no limit."""
    max_queued_tokens: int = Field(0, ge=0)
    """Tokens of requests that wait for --max-concurrent-tokens; 0 means no limit."""
    queue_timeout_s: float = Field(30.0, gt=0)
    """A request that waited so long is refused with QUEUE_FULL."""
    tenant_tokens_per_minute: int = Field(0, ge=0)
    """What each tenant may use, prompts and output; 0 means no limit. RATE_LIMITED beyond it."""
    tenant_requests_per_minute: int = Field(0, ge=0)
    """Requests that each tenant may make; 0 means no limit. RATE_LIMITED beyond it."""
    tenant_limits: dict[str, TenantLimits] = Field(default_factory=dict)
    """Tenants with limits of their own, as JSON: {"NAME": {"tokens_per_minute": N}}."""
    max_tenants: int = Field(10_000, ge=1)
    """Tenants without limits of their own that are remembered; further ones share a limit."""

    default_max_tokens: int = Field(512, ge=1)
    """Output limit of requests that give none."""
    request_timeout_s: float = Field(600.0, gt=0)
    """The longest time of a request; clients may ask for less."""
    ready_wait_s: float = Field(5.0, ge=0)
    """A new request waits so long for a replica to be ready."""
    resume_wait_s: float = Field(30.0, ge=0)
    """A stream that lost its worker or detokenizer waits so long for another."""
    stream_interval_ms: float = Field(30.0, ge=0)
    """Deltas after a stream's first are merged for so long; 0 sends every step."""
    client_buffer_bytes: int = Field(MIB, ge=1024)
    """What one output may have waiting for its client; more ends it with SLOW_CONSUMER."""
    write_timeout_s: float = Field(30.0, gt=0)
    """A client that takes no message for so long is let go."""

    attempt_timeout_s: float = Field(90.0, ge=0)
    """A request goes elsewhere when its replica shows no sign of work for so long, or for three
    times what was predicted until the first id, whichever is longer; 0: never. A worker's own
    --step-timeout-s, 60 by default, should come first."""
    text_timeout_s: float = Field(15.0, gt=0)
    """A tokenizer or detokenizer that owes an answer and says nothing for so long is left."""
    breaker_failures: int = Field(5, ge=0)
    """A replica that failed so many requests in a row gets no new ones; 0: never."""
    breaker_open_s: float = Field(10.0, gt=0)
    """It gets none for so long, then one; each time that this one fails, for twice as long."""
    outlier_ratio: float = Field(3.0, ge=0)
    """A replica whose first ids come this much later than its siblings', each against what was
    predicted, gets no new requests for a while; 0: never."""

    settle_s: float = Field(0.5, ge=0)
    """On SIGTERM new requests are still served for so long, until callers saw NOT_SERVING."""
    drain_grace_s: float = Field(30.0, ge=0)
    """After that running requests may take so long to finish."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    log_json: bool = False
    """Log one JSON object a line."""

    @field_validator("policy")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in POLICIES:
            raise ValueError(f"must be one of {', '.join(sorted(POLICIES))}")
        return name

    @field_validator("outlier_ratio")
    @classmethod
    def _later_is_above_one(cls, ratio: float) -> float:
        if 0 < ratio <= 1:
            raise ValueError("must be above 1, or 0 for never")
        return ratio

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.workers_api and not self.api_key and not _is_loopback(self.host):
            raise ValueError(f"--workers-api on {self.host} needs --api-key")
        return self

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if not self._overlap(self.port_step):
            return self
        step = next(step for step in range(1, 65_536) if not self._overlap(step))
        raise ValueError(
            f"ports of --processes overlap: give --port-step={step}, or ports further apart"
        )

    def _overlap(self, step: int) -> bool:
        numbers = range(self.processes)
        taken = [port for number in numbers for port in self._ports(number, step).values() if port]
        return self.processes > 1 and len(set(taken)) < len(taken)

    def _ports(self, number: int, step: int) -> dict[str, int]:
        names = ("port", "fleet_port", "metrics_port", *(["http_port"] if self.http else []))
        first = {name: int(getattr(self, name)) for name in names}
        return {name: port and port + number * step for name, port in first.items()}

    def ports_of(self, number: int) -> dict[str, int]:
        """Return the ports of one of the processes, by field; 0 stays 0."""
        return self._ports(number, self.port_step)
