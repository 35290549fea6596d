"""Protobuf <-> what the front knows: the only translation. Checks presence and lengths only."""

from collections.abc import Iterable, Mapping, Sequence

from radixmesh.blocks import pack_ids
from radixmesh.common.v1 import sampling_pb2
from radixmesh.errors import BadSampling
from radixmesh.worker.v1 import feed_pb2, worker_service_pb2
from worker.front.ask import Ask, GroupInfo
from worker.front.feed_out import Chunk, Event, Proof
from worker.front.jobs import StepPart
from worker.front.replica import Replica, ReplicaState
from worker.request import PromptScores, Sampling, Tops
from worker.schedule.check import MAX_BIASES, MAX_STOP_IDS

_STATES = {
    ReplicaState.UP: feed_pb2.REPLICA_STATE_UP,
    ReplicaState.DRAINING: feed_pb2.REPLICA_STATE_DRAINING,
    ReplicaState.DOWN: feed_pb2.REPLICA_STATE_DOWN,
}


def to_sampling(message: sampling_pb2.SamplingParams, *, choice: int) -> Sampling:
    """Read sampling parameters.

    Raises:
        BadSampling: `seed` or `max_tokens` is not set, or a list is longer than any may be.
    """
    for name in ("seed", "max_tokens"):
        if not message.HasField(name):
            raise BadSampling(f"{name} must be set", field=f"sampling.{name}")
    # Before millions of them are copied, which would keep everybody waiting.
    for name, limit in (("stop_token_ids", MAX_STOP_IDS), ("logit_bias", MAX_BIASES)):
        if len(getattr(message, name)) > limit:
            raise BadSampling(f"{name} has more than {limit} entries", field=name, limit=limit)
    return Sampling(
        seed=message.seed,
        choice=choice,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=tuple((one.token_id, one.bias) for one in message.logit_bias),
    )


def to_ask(submit: worker_service_pb2.Submit) -> Ask:
    """Read a link's request. Raises BadSampling."""
    return Ask(
        prompt=submit.prompt_ids,
        output=submit.output_ids,
        sampling=to_sampling(submit.sampling, choice=submit.choice),
        adapter=submit.adapter,
        cache_salt=submit.cache_salt,
        dp_rank=submit.dp_rank if submit.HasField("dp_rank") else None,
        priority=submit.priority,
        timeout_ms=submit.remaining_ms,
        fingerprint=submit.fingerprint,
    )


def to_plain_ask(
    request: worker_service_pb2.GenerateRequest, *, seed: int, max_tokens: int, timeout_ms: int
) -> Ask:
    """Read a plain request; `seed` and `max_tokens` stand in where it has none."""
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if not sampling.HasField("seed"):
        sampling.seed = seed
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = max_tokens
    return Ask(
        prompt=pack_ids(request.prompt_ids),
        sampling=to_sampling(sampling, choice=0),
        cache_salt=request.cache_salt,
        dp_rank=request.dp_rank if request.HasField("dp_rank") else None,
        timeout_ms=timeout_ms,
    )


def info(group: GroupInfo) -> feed_pb2.GroupInfo:
    """Describe a group."""
    return feed_pb2.GroupInfo(
        model=group.model,
        weight_version=group.weight_version,
        fingerprint=group.fingerprint,
        block_tokens=group.block_tokens,
        topology=feed_pb2.Topology(dp=group.dp, pp=group.pp, tp=group.tp),
        limits=feed_pb2.Limits(
            max_model_len=group.max_model_len,
            max_running=group.max_running,
            max_waiting=group.max_waiting,
            max_batched_tokens=group.max_batched_tokens,
            kv_blocks=group.kv_blocks,
            vocab_size=group.vocab_size,
            eos_token_ids=group.eos_ids,
        ),
        engine=group.engine,
    )


def status(replica: Replica) -> feed_pb2.ReplicaStatus:
    """Describe what a replica can do now."""
    return feed_pb2.ReplicaStatus(
        dp_rank=replica.dp_rank,
        incarnation=replica.incarnation,
        state=_STATES[replica.state],
    )


def add_step(
    frame: worker_service_pb2.AttachResponse, part: StepPart, *, dp_rank: int, incarnation: int
) -> None:
    """Put an owner's part of a step into a frame."""
    if part.accepted:
        frame.accepted.add(entry_ids=part.accepted)
    for started in part.started:
        frame.started.add(
            entry_id=started.request_id,
            cached_tokens=started.cached_tokens,
            waited_us=started.waited_us,
        )
    if part.entry_ids or part.prompt_scores:
        frame.steps.add(
            dp_rank=dp_rank,
            incarnation=incarnation,
            entry_ids=part.entry_ids,
            positions=part.positions,
            counts=part.counts,
            finishes=part.finishes,
            token_ids=part.token_ids,
            logprobs=part.logprobs,
            tops=tops(part.tops),
            prompt_scores=map(prompt_scores, part.prompt_scores),
        )


def tops(columns: Tops) -> worker_service_pb2.Tops | None:
    """Describe likeliest alternatives; None where nobody asked."""
    if not columns.counts:
        return None
    return worker_service_pb2.Tops(
        counts=columns.counts, token_ids=columns.ids, logprobs=columns.logprobs
    )


def prompt_scores(scores: PromptScores) -> worker_service_pb2.PromptScores:
    """Describe how likely a part of a prompt was; `request_id` is the owner's number."""
    return worker_service_pb2.PromptScores(
        entry_id=scores.request_id,
        position=scores.position,
        logprobs=scores.logprobs,
        tops=tops(scores.tops),
    )


def load(replicas: Iterable[Replica], seen: Mapping[int, int]) -> feed_pb2.Load:
    """Report the load of replicas; `seen` has the highest entry id each one knows of."""
    message = feed_pb2.Load()
    for replica in replicas:
        report = replica.load
        message.dp_ranks.append(replica.dp_rank)
        message.incarnations.append(replica.incarnation)
        message.running_counts.append(report.running)
        message.waiting_counts.append(report.waiting)
        message.uncached_token_counts.append(report.uncached_tokens)
        message.free_block_counts.append(report.free_blocks)
        message.prefill_rates.append(report.prefill_rate)
        message.decode_step_seconds.append(report.decode_step_s)
        message.seen_entry_ids.append(seen.get(replica.dp_rank, 0))
    return message


def add_events(
    frame: worker_service_pb2.AttachResponse, events: Sequence[Event], replica: Replica
) -> None:
    """Put cache changes into a frame."""
    for event in events:
        message = frame.events.add(
            dp_rank=replica.dp_rank,
            incarnation=replica.mirror.incarnation,
            sequence=event.sequence,
        )
        change = event.change
        if change.cleared:
            message.cleared.SetInParent()
        elif change.stored:
            message.stored.parent_key = change.parent
            message.stored.keys.extend(change.stored)
        else:
            message.removed.keys.extend(change.removed)


def add_chunk(frame: worker_service_pb2.AttachResponse, chunk: Chunk, replica: Replica) -> None:
    """Put a part of a snapshot into a frame."""
    frame.snapshots.add(
        dp_rank=replica.dp_rank,
        incarnation=replica.mirror.incarnation,
        as_of_sequence=chunk.as_of,
        first=chunk.first,
        last=chunk.last,
        keys=chunk.keys,
        parents=chunk.parents,
    )


def add_proof(frame: worker_service_pb2.AttachResponse, proof: Proof, replica: Replica) -> None:
    """Put a digest into a frame."""
    frame.digests.add(
        dp_rank=replica.dp_rank,
        incarnation=replica.mirror.incarnation,
        sequence=proof.sequence,
        block_count=proof.block_count,
        xor_keys=proof.xor_keys,
    )
