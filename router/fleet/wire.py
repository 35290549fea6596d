"""The worker's wire format and the fleet's values. The fleet's only converters of protobuf."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from radixmesh.common.v1 import sampling_pb2
from radixmesh.worker.v1 import feed_pb2, worker_service_pb2
from router.fleet.ask import SubmitSpec
from router.fleet.changes import Change, Cleared, Removed, Stored
from router.fleet.workload import Report
from router.request import Sampling

# Between what a rate (ids a second) or a step (seconds) of a living replica always is.
COUNT_LIMIT: Final = 1 << 30  # what comes on top of it still fits the API's 32 bits
SANE: Final = (1e-6, 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What a group is. Limits are those of one replica."""

    model: str
    weight_version: str
    fingerprint: str
    block_tokens: int
    topology: str
    engine: str
    dp: int
    max_model_len: int
    max_running: int
    step_tokens: int
    kv_blocks: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def from_load(load: feed_pb2.Load) -> Iterator[tuple[int, int, Report]]:
    """Take a load's columns apart: (dp_rank, incarnation, report) of each replica.

    Raises:
        ValueError: The columns differ in length.
    """
    columns = zip(
        load.dp_ranks,
        load.incarnations,
        load.running_counts,
        load.waiting_counts,
        load.uncached_token_counts,
        load.free_block_counts,
        load.prefill_rates,
        load.decode_step_seconds,
        load.seen_entry_ids,
        strict=True,
    )
    for dp_rank, incarnation, running, waiting, uncached, free, rate, step_s, seen in columns:
        report = Report(
            running=min(running, COUNT_LIMIT),
            waiting=min(waiting, COUNT_LIMIT),
            uncached_tokens=uncached,
            free_blocks=free,
            prefill_rate=_learned(rate),
            decode_step_s=_learned(step_s),
            seen_entry_id=seen,
        )
        yield dp_rank, incarnation, report


def _learned(value: float) -> float:
    """Return what a replica has learned of itself; 0, as if nothing, where that can't be.

    One that is no number would spoil the prices of all other replicas with its own.
    """
    return value if SANE[0] < value < SANE[1] else 0.0


def from_event(event: feed_pb2.CacheEvent) -> Change | None:
    """Return the change of an event, or None for a kind that is not known here."""
    match event.WhichOneof("change"):
        case "stored":
            return Stored(event.stored.parent_key, list(event.stored.keys))
        case "removed":
            return Removed(list(event.removed.keys))
        case "cleared":
            return Cleared()
        case _:
            return None


def from_info(info: feed_pb2.GroupInfo) -> GroupInfo:
    """Return what a group said of itself."""
    topology, limits = info.topology, info.limits
    return GroupInfo(
        model=info.model,
        weight_version=info.weight_version,
        fingerprint=info.fingerprint,
        block_tokens=max(1, info.block_tokens),
        topology=f"dp={topology.dp} pp={topology.pp} tp={topology.tp}",
        engine=info.engine,
        dp=max(1, topology.dp),
        max_model_len=limits.max_model_len,
        max_running=max(1, limits.max_running),
        step_tokens=limits.max_batched_tokens,
        kv_blocks=limits.kv_blocks,
        vocab_size=limits.vocab_size,
        eos_ids=tuple(limits.eos_token_ids),
    )


def to_submit(entry_id: int, dp_rank: int, spec: SubmitSpec) -> worker_service_pb2.Submit:
    """Return the wire form of one output to generate."""
    return worker_service_pb2.Submit(
        entry_id=entry_id,
        dp_rank=dp_rank,
        prompt_ids=spec.prompt_ids,
        output_ids=spec.output_ids,
        sampling=to_sampling(spec.sampling),
        choice=spec.choice,
        adapter=spec.adapter,
        cache_salt=spec.cache_salt,
        remaining_ms=0 if spec.timeout_s is None else max(1, int(spec.timeout_s * 1000)),
        priority=spec.priority,
        fingerprint=spec.fingerprint,
    )


def to_sampling(sampling: Sampling) -> sampling_pb2.SamplingParams:
    """Return the wire form of sampling whose seed and limit are decided."""
    return sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[
            sampling_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in sampling.logit_bias
        ],
    )
