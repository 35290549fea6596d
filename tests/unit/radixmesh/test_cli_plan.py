"""Which processes `radixmesh up` runs, on which ports, with which flags."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixmesh.cli.mesh import find_port_base
from radixmesh.cli.plan import Service, UpSettings, model_name, plan
from radixmesh.settings import ServiceSettings, load
from router.settings import RouterSettings
from worker.settings import WorkerSettings


def settings(*flags: str) -> UpSettings:
    return load(UpSettings, ["--model=/models/tiny", *flags], prog="radixmesh up")


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    return dict(flag.split("=", 1) for flag in argv if flag.startswith("--"))


def test_ports_follow_from_the_base() -> None:
    services = plan(settings("--groups=3"), port_base=30000)
    ports = {name: port for service in services for name, port in service.ports.items()}
    assert ports == {
        "http": 30000, "grpc": 30001, "metrics": 30002, "fleet": 30003,
        "tokenizer": 30010, "tokenizer-metrics": 30011,
        "detokenizer": 30020, "detokenizer-metrics": 30021,
        "worker-0": 30100, "worker-0-metrics": 30101,
        "worker-1": 30102, "worker-1-metrics": 30103,
        "worker-2": 30104, "worker-2-metrics": 30105,
    }  # fmt: skip


def test_every_service_is_a_module_of_this_python() -> None:
    services = plan(settings("--groups=1"), port_base=30000)
    assert [service.argv[:4][2:] for service in services] == [
        ("router", "--host=127.0.0.1"),
        ("tokenizer_svc", "tokenizer"),
        ("tokenizer_svc", "detokenizer"),
        ("worker", "--model=/models/tiny"),
    ]
    assert {service.argv[:2] for service in services} == {(sys.executable, "-m")}


def test_the_router_knows_every_leaf() -> None:
    router = plan(settings("--groups=2"), port_base=30000)[0]
    given = flags(router.argv)
    assert given["--groups"] == "worker-0=127.0.0.1:30100,worker-1=127.0.0.1:30102"
    assert given["--tokenizers"] == "127.0.0.1:30010"
    assert given["--detokenizers"] == "127.0.0.1:30020"
    assert given["--http-port"] == "30000"


def _passed_on() -> Iterator[tuple[str, str, object]]:
    """Flags of up that a service gets as they are: name, what up's help says, own default."""
    for name, field in UpSettings.model_fields.items():
        for kind in (RouterSettings, WorkerSettings):
            if field.default is None and name in kind.model_fields:
                own = kind.model_fields[name].get_default(call_default_factory=True)
                yield name, str(field.description), own


@pytest.mark.parametrize(("name", "said", "default"), list(_passed_on()))
def test_help_states_the_default_that_the_service_has(
    name: str, said: str, default: object
) -> None:
    shown = f"{default:.0f}" if isinstance(default, (int, float)) else default or "none"
    assert re.search(rf"[;] {shown}( \(.*\))? unless given\.$", said), said


@pytest.mark.parametrize(("grace_s", "drain_s"), [(5, 2.5), (1, 0.0)])
def test_the_router_has_time_for_last_words_before_it_would_be_killed(
    grace_s: float, drain_s: float
) -> None:
    router = plan(settings(f"--grace-s={grace_s}"), port_base=30000)[0]
    assert float(flags(router.argv)["--drain-grace-s"]) == drain_s


def test_a_flag_that_was_not_given_is_not_passed_on() -> None:
    router, *_, worker = plan(settings(), port_base=30000)
    assert "--policy" not in flags(router.argv)
    assert not any(name.startswith("--fake") for name in flags(worker.argv))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("policy", "round_robin"), ("api-key", "k"), ("default-max-tokens", "5"),
        ("request-timeout-s", "9.0"), ("max-concurrent", "7"), ("stream-interval-ms", "0.0"),
    ],
)  # fmt: skip
def test_router_flags_are_passed_on(flag: str, value: str) -> None:
    router, *leaves = plan(settings(f"--{flag}={value}"), port_base=30000)
    assert flags(router.argv)[f"--{flag}"] == value
    assert all(f"--{flag}" not in flags(leaf.argv) for leaf in leaves)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("engine", "fake"), ("dp", "3"), ("pp", "2"), ("tp", "2"), ("dtype", "float32"),
        ("block-tokens", "32"), ("kv-tokens", "64"), ("kv-bytes", "1048576"),
        ("max-model-len", "128"), ("max-running", "4"), ("max-waiting", "8"),
        ("max-batched-tokens", "16"), ("fake-eos-after", "5"),
        ("fake-prefill-tokens-per-s", "100.0"), ("fake-decode-ms", "1.5"),
        ("fake-kv-blocks", "10"), ("fake-faults", "a,b"),
    ],
)  # fmt: skip
def test_worker_flags_are_passed_on(flag: str, value: str) -> None:
    *others, worker = plan(settings("--groups=1", f"--{flag}={value}"), port_base=30000)
    assert flags(worker.argv)[f"--{flag}"] == value
    assert all(f"--{flag}" not in flags(other.argv) for other in others)


def test_threads_are_shared_by_all_ranks_unless_given() -> None:
    worker = plan(settings("--groups=4", "--dp=64"), port_base=30000)[-1]
    assert flags(worker.argv)["--threads"] == "1"
    worker = plan(settings("--threads=3"), port_base=30000)[-1]
    assert flags(worker.argv)["--threads"] == "3"


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({"model": "smollm2"}, "smollm2"),
        ({"model": "/models/tiny"}, "tiny"),
        ({"model": "/models/tiny.Q8.gguf"}, "tiny.Q8"),
        ({"model": "/models/tiny", "model_name": "mine"}, "mine"),
    ],
)
def test_the_served_name_is_the_models(given: dict[str, Any], served: str) -> None:
    chosen = UpSettings(**given)
    assert model_name(chosen) == served
    assert all(
        flags(leaf.argv)["--model-name"] == served for leaf in plan(chosen, port_base=30000)[1:]
    )


def test_every_worker_and_router_flag_exists_in_the_service() -> None:
    from router.settings import RouterSettings
    from tokenizer_svc.settings import DetokenizerSettings, TokenizerSettings
    from worker.settings import WorkerSettings

    unset = [name for name, field in UpSettings.model_fields.items() if field.default is None]
    everything = settings().model_copy(update=dict.fromkeys(unset, "x"))
    router, tokenizer, detokenizer, *workers = plan(everything, port_base=30000)
    kinds: tuple[tuple[Service, type[ServiceSettings]], ...] = (
        (router, RouterSettings),
        (tokenizer, TokenizerSettings),
        (detokenizer, DetokenizerSettings),
        *((worker, WorkerSettings) for worker in workers),
    )
    for service, kind in kinds:
        known = {f"--{name.replace('_', '-')}" for name in kind.model_fields}
        assert set(flags(service.argv)) <= known


def test_a_free_base_has_room_for_every_port(tmp_path: Path) -> None:
    base = find_port_base(settings("--groups=2"))
    assert 10_000 <= base < 32_000
