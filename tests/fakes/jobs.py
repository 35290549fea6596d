"""Groups, jobs, owners and steps for tests of the front."""

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from radixmesh.blocks import pack_ids
from radixmesh.errors import MeshError
from radixmesh.telemetry.metrics import WorkerMetrics
from worker.front.description import GroupSpec
from worker.front.group import Group
from worker.front.jobs import Job, Owner, StepPart
from worker.front.meters import Meters
from worker.front.probes import ProbePace
from worker.request import (
    CacheDigest,
    LoadReport,
    PromptScores,
    Started,
    StepOutput,
    Tops,
)


def group(
    dp: int = 1, *, weight_version: str = "", registry: CollectorRegistry | None = None
) -> Group:
    """A group of which nothing runs."""
    spec = GroupSpec(
        model="tiny",
        weight_version=weight_version,
        fingerprint="f" * 64,
        engine="fake",
        dp=dp,
        pp=1,
        tp=1,
        max_running=4,
        max_waiting=8,
        max_batched_tokens=64,
        dispatch="tokens",
        probes=ProbePace(interval_s=5, timeout_s=15, give_up_s=60, reading_s=600),
    )
    clock = asyncio.get_running_loop().time
    return Group(spec, Meters(WorkerMetrics(registry or CollectorRegistry())), clock)


class Nobody:
    """An owner that is only told apart."""

    def on_step(self, dp_rank: int, part: StepPart) -> None: ...

    def on_failed(self, entry_id: int, error: MeshError) -> None: ...

    def on_seen(self, dp_rank: int, entry_id: int) -> None: ...


def job(request_id: int, owner: Owner) -> Job:
    return Job(
        request_id=request_id,
        entry_id=request_id + 1000,
        owner=owner,
        dp_rank=0,
        prompt_tokens=1,
        uncached_tokens=1,
    )


def step(
    rows: Iterable[tuple[int, list[int]]],
    *,
    accepted: list[int] | None = None,
    started: list[Started] | None = None,
    logprobs: list[float] | None = None,
    tops: Tops | None = None,
    prompt_scores: list[PromptScores] | None = None,
) -> StepOutput:
    rows = list(rows)
    return StepOutput(
        step=1,
        accepted=accepted or [],
        started=started or [],
        request_ids=[request_id for request_id, _ in rows],
        positions=[request_id * 10 for request_id, _ in rows],
        counts=[len(ids) for _, ids in rows],
        finishes=[0 for _ in rows],
        token_ids=pack_ids(token for _, ids in rows for token in ids),
        logprobs=logprobs or [],
        failed=[],
        changes=[],
        digest=CacheDigest(0, 0),
        load=LoadReport(0, 0, 0, 0, 0.0, 0.0, 0),
        tops=tops or Tops(),
        prompt_scores=prompt_scores or [],
    )
