"""Reads traces in Mooncake's format. Knows files, no fleet.

A line is a JSON object: `timestamp` (ms), `input_length` and `output_length` (ids), and
`hash_ids`: one number for each 512 ids together with all that come before them. The last
one may stand for less than a block, which no cache of whole blocks keeps: it is dropped.
Output is of unknown content, so what it fills serves nobody. A trace names no sessions;
the first two blocks of a prompt stand for one, as in the trace all share the first.
"""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from bench.replay.job import Job, ReplayError, Scenario

BLOCK_TOKENS = 512
CACHE_TOKENS = 3_000_000


class Line(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path, *, limit: int = 0, spread: bool = False) -> Scenario:
    """Read a trace; `limit` takes only so many of its first requests.

    Timestamps are coarse, so many requests share one. `spread` puts them evenly between
    their own timestamp and the next one; without it they come in the same instant.

    Raises:
        ReplayError: The file can't be read, or a line of it is not as described.
    """
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ReplayError(f"the trace can't be read: {error.strerror}") from error
    jobs = [_job(line, number) for number, line in enumerate(lines[: limit or None], 1)]
    if not jobs:
        raise ReplayError("the trace holds no requests")
    jobs.sort(key=lambda job: job.at)
    if spread:
        jobs = _spread(jobs)
    return Scenario(name=path.stem, jobs=jobs, block_tokens=BLOCK_TOKENS, cache_tokens=CACHE_TOKENS)


def _spread(jobs: list[Job]) -> list[Job]:
    groups = [list(group) for _, group in groupby(jobs, key=lambda job: job.at)]
    ends = [group[0].at for group in groups[1:]] + [groups[-1][0].at]
    return [
        replace(job, at=job.at + (end - job.at) * index / len(group))
        for group, end in zip(groups, ends, strict=True)
        for index, job in enumerate(group)
    ]


def _job(raw: bytes, number: int) -> Job:
    try:
        line = msgspec.json.decode(raw, type=Line)
    except msgspec.MsgspecError as error:
        raise ReplayError(f"line {number} of the trace: {error}") from error
    if line.input_length < 1 or line.output_length < 0 or min(line.hash_ids, default=0) < 0:
        raise ReplayError(f"line {number} of the trace: a number is below its least value")
    whole = line.hash_ids[: line.input_length // BLOCK_TOKENS]
    return Job(
        at=line.timestamp / 1000,
        keys=tuple(key + 1 for key in whole),  # 0 is no key
        tokens=line.input_length,
        output=max(1, line.output_length),
        session=str(line.hash_ids[:2]),
    )
