"""A step's columns divide among owners without loss, in the owners' own numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from radixmesh.blocks import pack_ids, split_run
from tests.fakes.jobs import Nobody, job, step
from worker.front.jobs import split
from worker.request import PromptScores, Started, Tops


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
    parts = split(step(rows.items()), jobs)
    got = {}
    for owner, part in parts.items():
        runs = split_run(part.token_ids, part.counts)
        for entry_id, position, run in zip(part.entry_ids, part.positions, runs, strict=True):
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
    parts = split(output, jobs)
    assert list(parts) == [owner]
    assert parts[owner].accepted == [1001]
    assert parts[owner].started == [Started(1001, 32, 500)]


def test_logprobs_go_only_to_owners_who_asked() -> None:
    asked, quiet = Nobody(), Nobody()
    jobs = {1: job(1, asked), 2: job(2, quiet)}
    parts = split(step([(1, [7]), (2, [8])], logprobs=[-0.5, math.nan]), jobs)
    assert list(parts[asked].logprobs) == [-0.5]
    assert list(parts[quiet].logprobs) == []


@given(
    counts=st.lists(
        st.tuples(st.integers(-1, 2), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_every_id_keeps_its_own_alternatives(counts: list[tuple[int, list[int]]]) -> None:
    """Each id of each request has alternatives that name the request and the id."""
    people = [Nobody(), Nobody(), Nobody()]
    jobs = {number: job(number, people[who]) for number, (who, _) in enumerate(counts) if who >= 0}
    named = [
        (number, place, [1000 * number + 100 * place + each for each in range(count)])
        for number, (_, row) in enumerate(counts)
        for place, count in enumerate(row)
    ]
    tops = Tops(
        counts=[len(ids) for _, _, ids in named],
        ids=[one for _, _, ids in named for one in ids],
        logprobs=[-float(one) for _, _, ids in named for one in ids],
    )
    output = step([(number, row) for number, (_, row) in enumerate(counts)], tops=tops)
    for owner, part in split(output, jobs).items():
        mine = [ids for number, _, ids in named if number in jobs and jobs[number].owner is owner]
        flat = [one for ids in mine for one in ids]
        if part.tops.counts or any(mine):
            assert list(part.tops.counts) == [len(ids) for ids in mine]
        assert part.tops.ids == flat
        assert part.tops.logprobs == [-float(one) for one in flat]


def test_alternatives_go_only_to_owners_who_asked() -> None:
    asked, quiet = Nobody(), Nobody()
    jobs = {1: job(1, asked), 2: job(2, quiet)}
    tops = Tops([2, 0], [5, 6], [-0.1, -0.2])
    parts = split(step([(1, [7]), (2, [8])], tops=tops), jobs)
    assert parts[asked].tops == Tops([2], [5, 6], [-0.1, -0.2])
    assert parts[quiet].tops == Tops()


def test_scores_of_prompts_are_renamed_even_where_no_id_came() -> None:
    one, other = Nobody(), Nobody()
    jobs = {1: job(1, one), 2: job(2, other)}
    scores = [
        PromptScores(number, 1, [-0.5 * number], Tops([1], [number], [-0.1]))
        for number in (1, 2, 3)
    ]
    parts = split(step([], prompt_scores=scores), jobs)
    assert parts[one].prompt_scores == [PromptScores(1001, 1, [-0.5], Tops([1], [1], [-0.1]))]
    assert parts[other].prompt_scores == [PromptScores(1002, 1, [-1.0], Tops([1], [2], [-0.1]))]
    assert not parts[one].entry_ids
