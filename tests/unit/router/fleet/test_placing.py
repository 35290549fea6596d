"""Where the next request goes: load booked at the choice, hits, hints, and who is left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from radixmesh.blocks import Namespace, block_keys, pack_ids
from radixmesh.errors import ModelNotServed, NoReplicaReady, TokenizerMismatch
from router.fleet.ask import Ask
from router.fleet.changes import Stored
from router.fleet.replica import LEASE_S, RESUMES_UNSTARTED_LIMIT, SNAPSHOT_GRACE_S, Reported
from router.fleet.views import Phase
from router.fleet.workload import REPORT_LIFE_S, Report
from router.policy.choice import View
from router.policy.policies import POLICIES
from tests.fakes.fleet import Output, spec
from tests.fakes.group_link import INFO, FakeFleet

PROMPT = list(range(100, 166))  # 16 blocks, and a beginning of one
SEED = Namespace(model="tiny", fingerprint="f1").seed()


def keys(ids: Sequence[int]) -> list[int]:
    return block_keys(pack_ids(ids), block_tokens=4, seed=SEED)


def ask(ids: Sequence[int] = PROMPT) -> Ask:
    return Ask(model="tiny", ids=pack_ids(ids), fingerprint="f1", max_tokens=16)


def distinct(number: int, length: int = 64) -> list[int]:
    return list(range(number * 1000, number * 1000 + length))


@pytest.fixture
def four() -> FakeFleet:
    """One group of four idle replicas."""
    fake = FakeFleet("a")
    fake.links["a"].up(dp=4)
    return fake


def test_a_burst_is_spread_though_no_report_comes(four: FakeFleet) -> None:
    ranks = Counter(four.fleet.place(ask(distinct(n))).dp_rank for n in range(64))
    assert set(ranks.values()) == {16}


def test_replicas_of_a_group_are_taken_to_be_equally_fast(four: FakeFleet) -> None:
    for rank, rate in enumerate((300.0, 20_000.0, 0.0, 9_000.0)):
        report = Report(free_blocks=4096, prefill_rate=rate)
        four.links["a"].events.on_report(rank, 1, report)
    ranks: Counter[int] = Counter()
    for number in range(200):
        booking = four.fleet.place(ask(distinct(number)))
        ranks[booking.dp_rank] += 1
        booking.release()
    assert min(ranks.values()) > 25


def test_a_refresh_does_not_wipe_what_it_has_not_seen(four: FakeFleet) -> None:
    ranks: Counter[int] = Counter()
    for number in range(64):
        ranks[four.fleet.place(ask(distinct(number))).dp_rank] += 1
        for rank in range(4):
            four.links["a"].events.on_report(rank, 1, Report(free_blocks=4096))
    assert max(ranks.values()) - min(ranks.values()) <= 1


def test_sequential_requests_on_an_idle_fleet_go_everywhere(four: FakeFleet) -> None:
    ranks: Counter[int] = Counter()
    for number in range(200):
        booking = four.fleet.place(ask(distinct(number)))
        ranks[booking.dp_rank] += 1
        booking.release()
    assert min(ranks.values()) > 25


def test_siblings_that_arrive_together_meet_on_one_replica(four: FakeFleet) -> None:
    bookings = [four.fleet.place(ask()) for _ in range(16)]
    assert len({booking.dp_rank for booking in bookings}) == 1
    assert [booking.predicted_blocks for booking in bookings] == [0] + [16] * 15
    for booking in bookings:
        booking.release()
    assert four.fleet.place(ask()).predicted_blocks == 0
    assert four.fleet.tree.marked_count == 16


def test_no_hit_is_predicted_for_the_block_of_the_id_that_is_always_computed(
    four: FakeFleet,
) -> None:
    whole = PROMPT[:64]  # 16 blocks and not an id more
    four.links["a"].holds(2, keys(whole))
    assert four.fleet.place(ask(whole)).predicted_blocks == 15
    assert four.fleet.place(ask(PROMPT)).predicted_blocks == 16


def test_the_feed_confirms_what_was_in_flight(four: FakeFleet) -> None:
    booking = four.fleet.place(ask())
    four.links["a"].events.on_change(booking.dp_rank, 1, 1, Stored(0, keys(PROMPT)))
    assert four.fleet.tree.marked_count == 0
    booking.release()
    again = four.fleet.place(ask())
    assert (again.dp_rank, again.predicted_blocks) == (booking.dp_rank, 16)


def test_each_rank_has_a_cache_of_its_own(four: FakeFleet) -> None:
    four.links["a"].holds(3, keys(PROMPT))
    assert four.fleet.place(ask()).dp_rank == 3
    prices = four.fleet.explain(ask())
    assert {price.dp_rank: price.matched_blocks for price in prices} == {0: 0, 1: 0, 2: 0, 3: 16}
    assert prices[0].dp_rank == 3


def test_an_explanation_says_for_each_replica_what_it_holds_and_why_it_is_not_chosen(
    four: FakeFleet,
) -> None:
    link = four.links["a"]
    link.holds(3, keys(PROMPT)[:8])
    booking = four.fleet.place(ask())  # brings the other blocks
    link.events.on_status(0, 1, Reported.DRAINING)
    rows = four.fleet.explain(ask())
    best, first_other, second_other, last = rows
    assert (best.dp_rank, best.chosen, best.reason) == (3, True, "")
    assert (best.prompt_blocks, best.held_blocks, best.matched_blocks) == (16, 8, 16)
    assert best.waiting == 1
    for other in (first_other, second_other):
        assert (other.eligible, other.chosen, other.phase) == (True, False, Phase.READY)
        assert other.reason == f"{other.total_s - best.total_s:.3f} s dearer"
    assert (last.dp_rank, last.eligible, last.reason) == (0, False, "draining")
    assert last.phase is Phase.DRAINING
    booking.release()
    assert four.fleet.explain(ask())[0].matched_blocks == 8


def test_an_explanation_does_not_take_the_turn_of_a_policy_that_takes_turns() -> None:
    fake = FakeFleet("a", policy=POLICIES["round_robin"]())
    fake.links["a"].up(dp=4)
    for turn in range(4):
        rows = fake.fleet.explain(ask())
        assert [row.dp_rank for row in rows if row.chosen] == [turn]
        assert {row.reason for row in rows if not row.chosen} == {"round_robin chose another"}
        assert fake.fleet.place(ask()).dp_rank == turn


def test_what_was_possible_is_booked_beside_what_is_predicted() -> None:
    fake = FakeFleet("a", policy=POLICIES["round_robin"]())
    fake.links["a"].up(dp=2)
    fake.links["a"].holds(1, keys(PROMPT))
    booking = fake.fleet.place(ask())
    assert (booking.dp_rank, booking.predicted_blocks, booking.possible_blocks) == (0, 0, 16)


def test_groups_with_other_block_sizes_are_matched_by_their_own_keys() -> None:
    fake = FakeFleet("a", "b")
    fake.links["a"].up()
    fake.links["b"].up(info=replace(INFO, block_tokens=16))
    fake.links["b"].holds(0, block_keys(pack_ids(PROMPT), block_tokens=16, seed=SEED))
    booking = fake.fleet.place(ask())
    assert (booking.group_id, booking.block_tokens) == ("b", 16)
    assert (booking.prompt_blocks, booking.predicted_blocks) == (4, 4)


def test_a_replica_that_is_not_up_is_never_chosen(four: FakeFleet) -> None:
    four.links["a"].events.on_status(2, 1, Reported.DOWN)
    four.links["a"].events.on_status(1, 1, Reported.DRAINING)
    ranks = {four.fleet.place(ask(distinct(n))).dp_rank for n in range(40)}
    assert ranks == {0, 3}
    reasons = {price.dp_rank: price.reason for price in four.fleet.explain(ask())}
    assert (reasons[1], reasons[2]) == ("draining", "down")


def test_a_paused_replica_gets_less_and_less(four: FakeFleet) -> None:
    """Rank 0 neither reports nor finishes; the others finish at once."""
    ranks = []
    for number in range(60):
        four.clock.advance(0.2)
        for rank in (1, 2, 3):
            four.links["a"].events.on_report(rank, 1, Report(free_blocks=4096))
        booking = four.fleet.place(ask(distinct(number)))
        ranks.append(booking.dp_rank)
        booking.charge.entry_ids.append(number)
        if booking.dp_rank != 0:
            booking.release()
    assert ranks[:30].count(0) <= 2
    assert ranks[30:].count(0) == 0


def test_an_old_load_is_forgotten(four: FakeFleet) -> None:
    four.links["a"].events.on_report(0, 1, Report(running=60, waiting=60, uncached_tokens=99999))
    assert 0 not in {four.fleet.place(ask(distinct(n))).dp_rank for n in range(8)}
    four.pass_time(REPORT_LIFE_S + 1)
    assert 0 in {four.fleet.place(ask(distinct(n))).dp_rank for n in range(8, 24)}


def test_a_hint_is_followed_when_it_can_be(four: FakeFleet) -> None:
    hinted = replace(ask(), hint_group="a", hint_dp_rank=2)
    four.links["a"].holds(3, keys(PROMPT))
    assert four.fleet.place(hinted).dp_rank == 2
    four.links["a"].events.on_status(2, 1, Reported.DOWN)
    assert four.fleet.place(hinted).dp_rank == 3
    assert four.fleet.place(replace(ask(), hint_group="nobody")).dp_rank == 3


def test_what_is_to_be_avoided_is_taken_only_when_nothing_else_is_left(four: FakeFleet) -> None:
    avoiding = replace(ask(), avoid=frozenset({("a", rank, 1) for rank in (0, 1, 2)}))
    assert {four.fleet.place(avoiding).dp_rank for _ in range(8)} == {3}
    four.links["a"].events.on_status(3, 1, Reported.DOWN)
    assert four.fleet.place(avoiding).dp_rank in {0, 1, 2}


def test_no_more_of_a_resumed_output_is_reused_than_it_brought(four: FakeFleet) -> None:
    booking = four.fleet.place(replace(ask(PROMPT[:32]), resume=True))
    resumed = replace(spec(PROMPT[:4]), output_ids=pack_ids(PROMPT[4:32]))
    four.fleet.submit(booking, resumed, Output())
    four.links["a"].entries[1].on_started(24, 0.0)
    view = four.fleet.replicas()[booking.dp_rank]
    assert (view.cached_tokens, view.prompt_tokens) == (24, 32)


def test_ids_of_another_tokenizer_are_refused(four: FakeFleet) -> None:
    with pytest.raises(TokenizerMismatch):
        four.fleet.place(replace(ask(), fingerprint="f2"))
    four.fleet.place(replace(ask(), fingerprint=""))


def test_what_is_not_served_and_what_is_not_ready_differ() -> None:
    fake = FakeFleet("a")
    with pytest.raises(NoReplicaReady):
        fake.fleet.place(ask())
    fake.links["a"].up()
    with pytest.raises(ModelNotServed):
        fake.fleet.place(replace(ask(), model="other"))
    assert fake.fleet.place(replace(ask(), model="")).group_id == "a"
    fake.links["a"].events.on_status(0, 1, Reported.DOWN)
    with pytest.raises(NoReplicaReady):
        fake.fleet.place(ask())


def test_at_most_eight_interrupted_streams_wait_at_a_replica() -> None:
    fake = FakeFleet("a")
    fake.links["a"].up()
    resume = replace(ask(), resume=True)
    bookings = [fake.fleet.place(resume) for _ in range(RESUMES_UNSTARTED_LIMIT)]
    with pytest.raises(NoReplicaReady):
        fake.fleet.place(resume)
    fake.fleet.place(ask()).release()
    bookings[0].started(0)
    fake.fleet.place(resume)


def test_a_booking_goes_once_whoever_releases_it(four: FakeFleet) -> None:
    booking = four.fleet.place(ask())
    output = Output()
    four.fleet.submit(booking, spec(PROMPT), output)
    four.links["a"].events.on_status(booking.dp_rank, 2, Reported.UP)
    assert output.ends == 1
    assert booking.released
    booking.release()
    assert [view.in_flight for view in four.fleet.replicas()] == [0, 0, 0, 0]
    assert four.fleet.tree.marked_count == 0


def test_a_booking_whose_owner_vanished_expires(four: FakeFleet) -> None:
    booking = four.fleet.place(ask())
    four.pass_time(LEASE_S + 1)
    assert booking.released
    assert four.fleet.tree.marked_count == 0


def test_a_new_incarnation_holds_nothing_and_its_old_blocks_never_come_back(
    four: FakeFleet,
) -> None:
    link = four.links["a"]
    link.holds(1, keys(PROMPT))
    link.events.on_status(1, 2, Reported.UP)
    assert all(price.matched_blocks == 0 for price in four.fleet.explain(ask()))
    link.holds(1, keys(PROMPT), incarnation=1)
    link.events.on_change(1, 1, 1, Stored(0, keys(distinct(9))))
    assert all(price.matched_blocks == 0 for price in four.fleet.explain(ask()))
    link.holds(1, [], incarnation=2)
    link.events.on_change(1, 2, 1, Stored(0, keys(PROMPT)))
    assert four.fleet.place(ask()).dp_rank == 1


def test_while_a_view_is_not_trusted_own_routing_is_the_guess(four: FakeFleet) -> None:
    link = four.links["a"]
    link.holds(1, keys(PROMPT))
    running = four.fleet.place(ask())
    assert running.dp_rank == 1
    link.events.on_change(1, 1, 7, Stored(0, keys(distinct(5))))
    view = four.fleet.replicas()[1]
    assert (view.view, view.phase) == (View.DEGRADED, Phase.READY)
    assert link.resnapshots == [1]
    again = four.fleet.place(ask())
    assert (again.dp_rank, again.predicted_blocks) == (1, 16)
    later = [four.fleet.place(replace(ask(distinct(7, 66)), hint_group="a", hint_dp_rank=1))]
    later[0].release()
    hits = {
        price.dp_rank: price.matched_blocks for price in four.fleet.explain(ask(distinct(7, 66)))
    }
    assert hits == {0: 0, 1: 16, 2: 0, 3: 0}


def test_a_replica_without_a_snapshot_waits_ten_seconds_and_then_gets_requests() -> None:
    fake = FakeFleet("a")
    link = fake.links["a"]
    link.events.on_up(is_new=True)
    link.events.on_info(INFO)
    link.events.on_status(0, 1, Reported.UP)
    with pytest.raises(NoReplicaReady):
        fake.fleet.place(ask())
    assert not fake.settled
    fake.pass_time(SNAPSHOT_GRACE_S)
    assert fake.settled
    assert fake.fleet.place(ask()).predicted_blocks == 0


def test_a_group_that_never_answers_does_not_keep_the_router_from_being_ready() -> None:
    fake = FakeFleet("a", "b")
    fake.links["a"].up()
    assert not fake.settled
    fake.clock.advance(SNAPSHOT_GRACE_S)
    assert fake.settled


def test_a_replica_beyond_the_new_size_of_its_group_is_gone(four: FakeFleet) -> None:
    four.links["a"].holds(3, keys(PROMPT))
    four.links["a"].up(dp=2, info=replace(INFO, dp=2), incarnation=2)
    assert [view.dp_rank for view in four.fleet.replicas()] == [0, 1]
    four.fleet.tick()
    assert len(four.fleet.tree) == 0


def test_limits_are_the_least_of_all_groups() -> None:
    fake = FakeFleet("a", "b")
    fake.links["a"].up()
    fake.links["b"].up(info=replace(INFO, max_model_len=100))
    info = fake.fleet.limits("tiny")
    assert (info.max_model_len, info.ready_replicas, info.eos_ids) == (100, 2, (2,))
    assert fake.fleet.models() == [info]
