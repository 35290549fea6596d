"""The settings of a worker group: every flag, its default and what it means. Starts nothing."""

import os
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from radixmesh.settings import ServiceSettings, SettingsConfigDict

MIB = 1 << 20

# Some thirty years: the timers of the system take no more than three hundred.
Seconds = Annotated[float, Field(le=1e9)]

# As they travel to routers and to ranks.
Uint32 = Annotated[int, Field(lt=1 << 32)]
Int64 = Annotated[int, Field(lt=1 << 63)]


class WorkerSettings(ServiceSettings):
    """One model, served by `dp` replicas of `pp x tp` ranks behind one address."""

    model_config = SettingsConfigDict(env_prefix="RADIXMESH_WORKER_")

    model: str
    """Hugging Face directory, a .gguf file (converted once), or `smollm2`."""
    model_name: str = ""
    """Name under which the model is served; empty means the last path part of --model."""
    weight_version: str = ""
    """Which weights these are; part of every block key. Empty unless weights are swapped."""
    engine: Literal["torch", "fake"] = "torch"
    """What computes: `torch`, or `fake` (ids from a hash; needs no weights and no torch)."""

    dp: int = Field(1, ge=1, le=1024)
    """Data-parallel replicas."""
    pp: int = Field(1, ge=1, le=64)
    """Pipeline stages of a replica."""
    tp: int = Field(1, ge=1, le=64)
    """Tensor-parallel ranks of a stage."""
    nnodes: int = Field(1, ge=1, le=64)
    """Hosts that share the group; each runs --tp divided by --nnodes ranks of every stage."""
    node_rank: int = Field(0, ge=0)
    """Which of those hosts this is; 0 serves, the others run ranks for it."""
    rendezvous: str = ""
    """HOST:PORT at host 0 where the others come; needed with --nnodes above 1."""
    carrier: Literal["auto", "local", "gloo"] = "auto"
    """How steps are told to the ranks: `local` sockets, or `gloo`; auto: local on one host, gloo on
    several."""
    tensors: Literal["auto", "shm", "gloo"] = "auto"
    """How tensor-parallel ranks add up: in shared memory, or by gloo (NCCL on CUDA); auto: in
    shared memory on one host, where it can be had; several hosts: gloo."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Plan a step while the one before it is computed; needs --pp 1; auto: off.
    On a CPU, planner and model share the cores: see `python -m bench.overlap`."""
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Number format; `auto` is bfloat16 where the hardware has it, else float32."""
    threads: Int64 = Field(0, ge=0)
    """CPU threads of a rank; 0 means the usable cores divided by the ranks."""

    block_tokens: int = Field(0, ge=0, le=1024)
    """Ids per block of the KV cache; 0 means what the engine wants (16 as a rule)."""
    kv_tokens: Int64 = Field(0, ge=0)
    """Ids whose KV one replica can hold; 0 means as many as --kv-bytes allow."""
    kv_bytes: Int64 = Field(1024 * MIB, ge=MIB)
    """Bytes of each rank's KV cache when --kv-tokens is 0; 1 GiB."""
    max_model_len: Uint32 = Field(0, ge=0)
    """Prompt and output ids of one request; 0 means what the model allows."""
    max_running: Uint32 = Field(64, ge=1)
    """Requests of one replica in one step."""
    max_waiting: Uint32 = Field(1024, ge=1)
    """Requests of one replica that wait; more are refused with QUEUE_FULL."""
    max_batched_tokens: Uint32 = Field(512, ge=1)
    """Ids that one replica computes in one step; longer prompts go in chunks."""

    order: Literal["lpm", "fcfs"] = "lpm"
    """Who goes first of those that wait: the longest cached prefix, or the first come."""
    ageing_s: Seconds = Field(1.0, ge=0)
    """A request that has waited so many seconds goes before any that has not."""
    dispatch: Literal["tokens", "shortest_queue", "round_robin"] = "tokens"
    """Which replica takes a request for which none was named (direct callers of WorkerService)."""

    fake_eos_after: Int64 = Field(0, ge=0)
    """Fake engine: an output ends by itself after so many ids; 0 means never."""
    fake_prefill_tokens_per_s: float = Field(0.0, ge=0)
    """Fake engine: pace of prefill; 0 means at once."""
    fake_decode_ms: float = Field(0.0, ge=0, le=1e9)
    """Fake engine: milliseconds of a step that decodes; 0 means at once."""
    fake_kv_blocks: Int64 = Field(0, ge=0)
    """Fake engine: blocks of the KV cache; 0 means from --kv-tokens, else 4096."""
    fake_faults: list[str] = Field([])
    """Fake engine: faults to act out, for tests; a comma-separated list."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(30100, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the metrics page; 0 means none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""

    startup_timeout_s: Seconds = Field(600.0, gt=0)
    """Ranks that load a model, or new weights, for more seconds are started anew."""
    step_timeout_s: Seconds = Field(60.0, gt=0)
    """A replica whose ranks, busy or idle, answer nothing for so many seconds is started anew."""
    peer_timeout_s: Seconds = Field(4.0, gt=0)
    """A rank that another one waits for answers within so many seconds, or the replica restarts."""
    probe_interval_s: Seconds = Field(5.0, gt=0)
    """Every so many seconds all ranks of a replica are asked whether they are there."""
    probe_timeout_s: Seconds = Field(15.0, gt=0)
    """A replica that leaves such a question unanswered for so long is not ready."""
    max_failures: int = Field(10, ge=0)
    """When every replica failed so often in a row, the front exits with 1; 0: never."""
    drain_grace_s: Seconds = Field(30.0, ge=0)
    """On SIGTERM, or when a replica retires, requests may take so many seconds to finish."""

    @field_validator("*")
    @classmethod
    def _texts_travel(cls, value: object) -> object:
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError as error:
            raise ValueError("Input should be text in UTF-8") from error
        return value

    @model_validator(mode="after")
    def _requests_fit(self) -> "WorkerSettings":
        if self.max_model_len == 1:
            raise ValueError("--max-model-len: a prompt and its output need 2 at least, got 1")
        if self.kv_tokens == self.block_tokens == 1:
            raise ValueError("--kv-tokens: a prompt and its output need 2 at least, got 1")
        return self

    @model_validator(mode="after")
    def _overlap_fits(self) -> "WorkerSettings":
        if self.overlap == "on" and self.pp > 1:
            raise ValueError(
                f"--overlap: on needs --pp 1, got --pp {self.pp}; stages overlap by themselves"
            )
        return self

    @model_validator(mode="after")
    def _hosts_fit(self) -> "WorkerSettings":
        if self.tp % self.nnodes:
            raise ValueError(f"--nnodes: {self.nnodes} does not divide --tp {self.tp}")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank: must be below --nnodes, got {self.node_rank}")
        if self.nnodes == 1:
            return self
        if self.carrier == "local":
            raise ValueError("--carrier: local reaches one host only, use gloo")
        if self.tensors == "shm":
            raise ValueError("--tensors: shm reaches one host only, use gloo")
        if not self.rendezvous:
            raise ValueError("--rendezvous: needed with --nnodes above 1")
        host, port = self.meeting_place
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"--rendezvous: expected HOST:PORT, got {self.rendezvous!r}")
        return self

    @property
    def meeting_place(self) -> tuple[str, str]:
        """Host and port of the rendezvous."""
        host, _, port = self.rendezvous.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), port

    @property
    def served_name(self) -> str:
        """The name under which routers know the model."""
        return self.model_name or PurePath(self.model).name

    @property
    def rank_threads(self) -> int:
        """CPU threads that each rank gets; at least one."""
        if self.threads:
            return self.threads
        cores = len(os.sched_getaffinity(0))
        return max(1, cores // self.ranks_here)

    @property
    def ranks_here(self) -> int:
        """Ranks that run on this host."""
        return self.dp * self.pp * self.tp // self.nnodes
