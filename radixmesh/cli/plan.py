"""Which processes a local mesh has: flags in, command lines and ports out. Starts nothing."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from pydantic import Field

from radixmesh.models import DEFAULT_MODEL
from radixmesh.settings import ServiceSettings, SettingsConfigDict

__all__ = ["Service", "UpSettings", "model_name", "plan"]

# What is passed on as it was given; a flag that was not given leaves the service its default.
_ROUTER_FLAGS = (
    "policy",
    "api_key",
    "default_max_tokens",
    "request_timeout_s",
    "max_concurrent",
    "stream_interval_ms",
)
_WORKER_FLAGS = (
    "engine",
    "dp",
    "pp",
    "tp",
    "dtype",
    "block_tokens",
    "kv_tokens",
    "kv_bytes",
    "max_model_len",
    "max_running",
    "max_waiting",
    "max_batched_tokens",
    "fake_eos_after",
    "fake_prefill_tokens_per_s",
    "fake_decode_ms",
    "fake_kv_blocks",
    "fake_faults",
)

# What a router needs beside its drain grace: until callers saw NOT_SERVING, for last words.
_ROUTER_ENDS_S = 2.5


class UpSettings(ServiceSettings):
    """A local mesh of separate processes: a router, a tokenizer, a detokenizer, worker groups.

    HTTP listens on the port base, the router's gRPC on +1, its metrics on +2, FleetService
    on +3, the tokenizer on +10, the detokenizer on +20, worker group g on +100+2g; each
    leaf's metrics on the port after its own.
    """

    model_config = SettingsConfigDict(env_prefix="RADIXMESH_UP_")

    model: str = DEFAULT_MODEL
    """Hugging Face directory, .gguf file, or the name of the default model."""
    model_name: str = ""
    """Name under which the model is served; empty means the last path part of --model."""
    engine: Literal["torch", "fake"] = "torch"
    """What computes; `fake` needs no weights and no torch."""
    groups: int = Field(2, ge=1, le=64)
    """Worker groups."""
    dp: int = Field(1, ge=1, le=64)
    """Replicas of each group."""
    pp: int = Field(1, ge=1, le=64)
    """Pipeline stages of a replica."""
    tp: int = Field(1, ge=1, le=64)
    """Tensor-parallel ranks of a stage."""
    dtype: str | None = None
    """Worker: number format: auto, bfloat16, float32 or float16; auto unless given."""
    threads: int = Field(0, ge=0)
    """CPU threads of a rank; 0 means usable cores / all ranks of the mesh."""

    host: str = "127.0.0.1"
    """Address that everything listens on."""
    port_base: int = Field(30000, ge=0, le=65000)
    """First port; 0 finds a free range."""
    ready_file: Path | None = None
    """Written (JSON: addresses, ports, pids) when a request can be served; gone at the end."""
    ready_timeout_s: float = Field(300.0, gt=0)
    """Give up when no request can be served after so many seconds."""
    grace_s: float = Field(5.0, ge=0)
    """Seconds that processes get to end by themselves, the router first."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the services log."""

    policy: str | None = None
    """Router: how a replica is chosen: price, cache_aware, least_load, power_of_two, round_robin,
    random or consistent_hash; price unless given."""
    api_key: str | None = None
    """Router: the key that clients must bring; none unless given."""
    default_max_tokens: int | None = None
    """Router: output limit of requests that give none; 512 unless given."""
    request_timeout_s: float | None = None
    """Router: the longest time of a request; 600 unless given."""
    max_concurrent: int | None = None
    """Router: requests at once; 0 (no limit) unless given."""
    stream_interval_ms: float | None = None
    """Router: later deltas are merged for so long; 0 sends every step; 30 unless given."""

    block_tokens: int | None = None
    """Worker: ids per block; 0 (what the engine wants) unless given."""
    kv_tokens: int | None = None
    """Worker: ids whose KV a replica can hold; 0 (by --kv-bytes) unless given."""
    kv_bytes: int | None = None
    """Worker: bytes of each rank's KV cache; 1073741824 (1 GiB) unless given."""
    max_model_len: int | None = None
    """Worker: prompt and output ids of a request; 0 (what the model allows) unless given."""
    max_running: int | None = None
    """Worker: requests of a replica in one step; 64 unless given."""
    max_waiting: int | None = None
    """Worker: requests of a replica that wait; 1024 unless given."""
    max_batched_tokens: int | None = None
    """Worker: ids that a replica computes in one step; 512 unless given."""
    fake_eos_after: int | None = None
    """Fake engine: an output ends by itself after so many ids; 0 (never) unless given."""
    fake_prefill_tokens_per_s: float | None = None
    """Fake engine: pace of prefill; 0 (at once) unless given."""
    fake_decode_ms: float | None = None
    """Fake engine: milliseconds of a step that decodes; 0 (at once) unless given."""
    fake_kv_blocks: int | None = None
    """Fake engine: blocks of the KV cache; 0 (by --kv-tokens, else 4096) unless given."""
    fake_faults: str | None = None
    """Fake engine: faults to act out, comma-separated; none unless given."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process of the mesh; `ports` are named for people and the ready file."""

    name: str
    argv: tuple[str, ...]
    ports: dict[str, int]


def model_name(settings: UpSettings) -> str:
    """Return the name under which the model is served."""
    path = PurePath(settings.model)
    return settings.model_name or (path.stem if path.suffix == ".gguf" else path.name)


def plan(settings: UpSettings, *, port_base: int) -> list[Service]:
    """Return the processes of a mesh; the router comes first."""
    leaves = [
        _leaf(settings, "tokenizer", port_base + 10),
        _leaf(settings, "detokenizer", port_base + 20),
        *(
            _worker(settings, group, port_base + 100 + 2 * group)
            for group in range(settings.groups)
        ),
    ]
    return [_router(settings, port_base, leaves), *leaves]


def _router(settings: UpSettings, base: int, leaves: list[Service]) -> Service:
    places = {leaf.name: f"{settings.host}:{leaf.ports[leaf.name]}" for leaf in leaves}
    groups = [f"{name}={place}" for name, place in places.items() if name.startswith("worker")]
    ports = {"http": base, "grpc": base + 1, "metrics": base + 2, "fleet": base + 3}
    argv = (
        *_command("router"),
        *_flags(
            host=settings.host,
            http_port=ports["http"],
            port=ports["grpc"],
            metrics_port=ports["metrics"],
            fleet_port=ports["fleet"],
            groups=",".join(groups),
            tokenizers=places["tokenizer"],
            detokenizers=places["detokenizer"],
            log_level=settings.log_level,
            # Clients are told of the end before the router is killed.
            drain_grace_s=max(0.0, settings.grace_s - _ROUTER_ENDS_S),
        ),
        *_given(settings, _ROUTER_FLAGS),
    )
    return Service("router", argv, ports)


def _leaf(settings: UpSettings, role: str, port: int) -> Service:
    argv = (*_command("tokenizer_svc"), role, *_common(settings, port))
    return Service(role, argv, {role: port, f"{role}-metrics": port + 1})


def _worker(settings: UpSettings, group: int, port: int) -> Service:
    ranks = settings.groups * settings.dp * settings.pp * settings.tp
    threads = settings.threads or max(1, _usable_cores() // ranks)
    name = f"worker-{group}"
    argv = (
        *_command("worker"),
        *_common(settings, port),
        *_flags(threads=threads),
        *_given(settings, _WORKER_FLAGS),
    )
    return Service(name, argv, {name: port, f"{name}-metrics": port + 1})


def _command(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def _common(settings: UpSettings, port: int) -> Iterator[str]:
    return _flags(
        model=settings.model,
        model_name=model_name(settings),
        host=settings.host,
        port=port,
        metrics_port=port + 1,
        log_level=settings.log_level,
    )


def _given(settings: UpSettings, names: tuple[str, ...]) -> Iterator[str]:
    return _flags(**{name: getattr(settings, name) for name in names})


def _flags(**values: object) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}={value}"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
