"""The flags that say who is in the fleet, and what is built of them."""

import random
from pathlib import Path
from typing import Any

import pytest

from radixmesh.settings import load
from router.discovery.lookup import Lookup, Wanted
from router.membership import Targets, discovery_of
from router.settings import RouterSettings


def read(*argv: str) -> RouterSettings:
    return load(RouterSettings, argv, prog="radixmesh-router")


class Nobody:
    """A target that nobody joins."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    def join(self, member: Any) -> str:
        self.joined.append(member.address)
        return str(member.address)


def test_every_flag_brings_its_source_and_flags_join_at_once() -> None:
    groups: Any = Nobody()
    texts: Any = Nobody()
    targets = Targets(groups=groups, tokenizers=texts, detokenizers=texts)
    settings = read(
        "--groups=a=h:1,[::1]:2",
        "--tokenizers=t:1",
        "--members-file=members.yaml",
        "--groups-dns=w.svc:30100,_grpc._tcp.w.svc",
        "--detokenizers-dns=d.svc:7",
        "--groups-service=inference/workers:grpc",
        "--tokenizers-service=tokenizers",
        "--kubernetes-port=9",
    )
    discovery = discovery_of(settings, targets, random.Random(1))
    assert groups.joined == ["h:1", "[::1]:2"]
    assert texts.joined == ["t:1"]
    said = repr(discovery)
    for source, count in (
        ("file members.yaml", 3),
        ("dns w.svc", 1),
        ("dns _grpc._tcp.w.svc", 1),
        ("dns d.svc", 1),
        ("kubernetes kubernetes.io/service-name=workers", 1),
        ("kubernetes kubernetes.io/service-name=tokenizers", 1),
    ):
        assert said.count(f"'{source}'") == count, source
    assert not discovery.listed


def test_without_a_source_all_are_listed() -> None:
    nobody: Any = Nobody()
    targets = Targets(groups=nobody, tokenizers=nobody, detokenizers=nobody)
    assert discovery_of(read(), targets, random.Random(1)).listed


def test_services_are_named_with_what_is_given_apart() -> None:
    plain = Wanted.service("w", namespace="ns", port="grpc")
    assert (plain.namespace, plain.port) == ("ns", "grpc")
    full = Wanted.service("other/w:7", namespace="ns", port="grpc")
    assert (full.selector, full.namespace, full.port) == (
        "kubernetes.io/service-name=w",
        "other",
        "7",
    )
    assert Lookup.parse("_grpc._tcp.w") == Lookup("_grpc._tcp.w", 0)


@pytest.mark.parametrize(
    "flag",
    [
        "--groups=h",
        "--groups=::1:5",
        "--groups=h:70000",
        "--groups-dns=name",
        "--groups-dns=name:0",
        "--tokenizers-dns=a:b:1",
        "--groups-service=Not A Name",
        "--groups-service=ns/",
        "--groups-service=w --groups-selector=a=b",
        "--dns-interval-s=0",
    ],
)
def test_a_mistake_ends_with_a_message(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = flag.split() if "--groups-selector" in flag else [flag]
    with pytest.raises(SystemExit) as leaving:
        read(*argv)
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("radixmesh-router: --")


def test_a_file_of_settings_holds_them_too(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("groups_dns: [w.svc:1]\nmembers_file: /a/b\nleave_grace_s: 5\n")
    settings = read("--config", str(file))
    assert settings.groups_dns == ["w.svc:1"]
    assert settings.members_file == Path("/a/b")
    assert settings.leave_grace_s == 5
