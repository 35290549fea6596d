"""What the pipeline asks of the fleet and what it is told. Data and roles; no wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from radixmesh.errors import MeshError
from router.request import Sampling

# (group_id, dp_rank, incarnation) of a replica.
ReplicaKey = tuple[str, int, int]


class WorkerSink(Protocol):
    """What waits for one output. Called on the loop, quick; must not raise."""

    def on_accepted(self) -> None:
        """The replica queued it."""

    def on_started(self, cached_tokens: int, waited_s: float, /) -> None:
        """Its prefill began; so many prompt ids were found in the cache."""

    def on_tokens(
        self, position: int, ids: bytes, logprobs: Sequence[float], finish: int, /
    ) -> None:
        """New ids, the first at output `position`. Closed after a `finish` other than 0."""

    def on_failed(self, error: MeshError, /) -> None:
        """It ended by an error. At most once, and nothing comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A place is wanted for a prompt.

    Attributes:
        model: Served name; empty means the only one.
        ids: Prompt ids and those generated so far, little-endian uint32.
        fingerprint: Of the tokenizer that made them; empty skips the check.
        max_tokens: Output ids that may still come.
        hint_group: Preferred group, when it is ready.
        avoid: Replicas that are taken only when there is no other.
        session: What the client calls its conversation; empty when it gave nothing.
        resume: Whether this continues an interrupted stream.
    """

    model: str
    ids: bytes
    fingerprint: str
    max_tokens: int
    adapter: str = ""
    cache_salt: str = ""
    hint_group: str = ""
    hint_dp_rank: int | None = None
    avoid: frozenset[ReplicaKey] = frozenset()
    session: str = ""
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitSpec:
    """One output to generate. `sampling` has its seed and max_tokens decided.

    Attributes:
        prompt_ids: Little-endian uint32.
        output_ids: Ids that earlier attempts generated, little-endian uint32.
        timeout_s: Until the deadline; None means none.
    """

    prompt_ids: bytes
    sampling: Sampling
    output_ids: bytes = b""
    choice: int = 0
    adapter: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    priority: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A served model; `max_model_len` is the least of all groups that serve it."""

    name: str
    max_model_len: int
    fingerprint: str
    ready_replicas: int
    vocab_size: int
    eos_ids: tuple[int, ...]
