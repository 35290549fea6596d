"""A step's columns divide among owners without loss, in the owners' own numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from radixmesh.blocks import pack_ids, split_run
from tests.fakes.jobs import Nobody, job, step
from worker.front.jobs import split
from worker.request import Started


@given(
    rows=st.dictionaries(
        st.integers(1, 40), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3)
    ),
    owners=st.lists(st.integers(-1, 2), min_size=41, max_size=41),
)
def test_every_owner_gets_exactly_its_own_ids(
    rows: dict[int, list[int]], owners: list[int]
) -> None:
    people = [Nobody(), Nobody(), Nobody()]
    jobs = {number: job(number, people[owners[number]]) for number in rows if owners[number] >= 0}
    shares = split(step(rows.items()), jobs)
    got = {}
    for owner, share in shares.items():
        runs = split_run(share.token_ids, share.counts)
        for entry_id, position, run in zip(share.entry_ids, share.positions, runs, strict=True):
            got[owner, entry_id, position] = run
    wanted = {
        (each.owner, number + 1000, number * 10): pack_ids(rows[number])
        for number, each in jobs.items()
    }
    assert got == wanted


def test_acceptance_and_start_are_renamed_and_strangers_left_out() -> None:
    owner = Nobody()
    jobs = {1: job(1, owner)}
    output = step([], accepted=[1, 2], started=[Started(1, 32, 500), Started(2, 0, 0)])
    shares = split(output, jobs)
    assert list(shares) == [owner]
    assert shares[owner].accepted == [1001]
    assert shares[owner].started == [Started(1001, 32, 500)]


def test_logprobs_go_only_to_owners_who_asked() -> None:
    asked, quiet = Nobody(), Nobody()
    jobs = {1: job(1, asked), 2: job(2, quiet)}
    shares = split(step([(1, [7]), (2, [8])], logprobs=[-0.5, math.nan]), jobs)
    assert list(shares[asked].logprobs) == [-0.5]
    assert list(shares[quiet].logprobs) == []
