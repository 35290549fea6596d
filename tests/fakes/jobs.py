"""Jobs, owners and steps for tests of the front."""

from collections.abc import Iterable

from radixmesh.blocks import pack_ids
from radixmesh.errors import MeshError
from worker.front.jobs import Job, Owner, StepPart
from worker.request import (
    CacheDigest,
    LoadReport,
    PromptScores,
    Started,
    StepOutput,
    Tops,
)


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
