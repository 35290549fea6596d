"""Requests that are under way in a replica, and how a step's columns divide among their owners.

A job ties the front's number for a request to the owner (a router's link, or one plain
call) and the owner's number for it. Pure: knows columns; no wire, no sockets, no clock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import MeshError
from worker.request import NO_TOPS, PromptScores, Started, StepOutput, Tops


@dataclass(slots=True)
class StepPart:
    """One owner's part of a step, in the owner's numbers. Columns as in `StepOutput`."""

    accepted: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)  # request_id is the owner's number
    entry_ids: Sequence[int] = ()
    positions: Sequence[int] = ()
    counts: Sequence[int] = ()
    finishes: Sequence[int] = ()
    token_ids: bytes = b""
    logprobs: Sequence[float] = ()
    tops: Tops = NO_TOPS
    prompt_scores: list[PromptScores] = field(default_factory=list)  # likewise
    weight_version: str = ""  # of the weights that chose the ids


class Owner(Protocol):
    """Who submitted jobs. Its methods are quick and never raise."""

    def on_step(self, dp_rank: int, part: StepPart) -> None:
        """Take a part of a step. Jobs that finish in it are over."""
        ...

    def on_failed(self, entry_id: int, error: MeshError) -> None:
        """Take the failure of a job, which is over."""
        ...

    def on_seen(self, dp_rank: int, entry_id: int) -> None:
        """Learn that the replica's load from now on includes this submit."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A request in a replica, from dispatch to its end."""

    request_id: int
    entry_id: int
    owner: Owner
    dp_rank: int
    prompt_tokens: int  # that it came with: of a resumed one also the output so far
    uncached_tokens: int  # at most so many are to be computed
    counted: bool = True  # the front's own probes are not


def split(output: StepOutput, jobs: Mapping[int, Job]) -> dict[Owner, StepPart]:
    """Divide a step among the owners of its jobs; what belongs to no job is left out."""
    parts: dict[Owner, StepPart] = {}
    for request_id in output.accepted:
        job = jobs.get(request_id)
        if job is not None:
            _part_of(parts, job).accepted.append(job.entry_id)
    for started in output.started:
        job = jobs.get(started.request_id)
        if job is not None:
            renamed = Started(job.entry_id, started.cached_tokens, started.waited_us)
            _part_of(parts, job).started.append(renamed)
    for scores in output.prompt_scores:
        job = jobs.get(scores.request_id)
        if job is not None:
            of_owner = PromptScores(job.entry_id, scores.position, scores.logprobs, scores.tops)
            _part_of(parts, job).prompt_scores.append(of_owner)
    if output.request_ids:
        _split_ids(output, jobs, parts)
    return parts


def _part_of(parts: dict[Owner, StepPart], job: Job) -> StepPart:
    part = parts.get(job.owner)
    if part is None:
        part = parts[job.owner] = StepPart()
    return part


def _split_ids(output: StepOutput, jobs: Mapping[int, Job], parts: dict[Owner, StepPart]) -> None:
    found = [jobs.get(request_id) for request_id in output.request_ids]
    present = [job for job in found if job is not None]
    owners = {job.owner for job in present}
    if len(owners) == 1 and len(present) == len(found):
        # The usual case, one router: the columns go on as they are.
        part = _part_of(parts, present[0])
        part.entry_ids = [job.entry_id for job in present]
        part.positions, part.counts = output.positions, output.counts
        part.finishes, part.token_ids = output.finishes, output.token_ids
        part.logprobs, part.tops = output.logprobs, output.tops
        return
    rows: dict[Owner, list[int]] = {owner: [] for owner in owners}
    for row, job in enumerate(found):
        if job is not None:
            rows[job.owner].append(row)
    starts = [0, *accumulate(output.counts)]
    for owner, chosen in rows.items():
        entry_ids = [job.entry_id for row in chosen if (job := found[row]) is not None]
        part = parts.setdefault(owner, StepPart())
        part.entry_ids = entry_ids
        _fill(part, output, chosen, starts)


def _fill(part: StepPart, output: StepOutput, rows: Sequence[int], starts: Sequence[int]) -> None:
    part.positions = [output.positions[row] for row in rows]
    part.counts = [output.counts[row] for row in rows]
    part.finishes = [output.finishes[row] for row in rows]
    part.token_ids = b"".join(
        output.token_ids[starts[row] * ID_BYTES : starts[row + 1] * ID_BYTES] for row in rows
    )
    if not output.logprobs and not output.tops.counts:
        return
    places = [place for row in rows for place in range(starts[row], starts[row + 1])]
    if output.logprobs:
        logprobs = [output.logprobs[place] for place in places]
        part.logprobs = () if all(map(math.isnan, logprobs)) else logprobs
    if output.tops.counts:
        part.tops = _tops_at(output.tops, places)


def _tops_at(tops: Tops, places: Sequence[int]) -> Tops:
    """Return the alternatives of some of a step's ids; nothing at all where these have none."""
    starts = [0, *accumulate(tops.counts)]
    if all(tops.counts[place] == 0 for place in places):
        return NO_TOPS
    spans = [slice(starts[place], starts[place + 1]) for place in places]
    return Tops(
        counts=[tops.counts[place] for place in places],
        ids=[one for span in spans for one in tops.ids[span]],
        logprobs=[value for span in spans for value in tops.logprobs[span]],
    )
