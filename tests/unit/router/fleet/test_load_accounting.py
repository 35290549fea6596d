"""What is sent counts from the choice on, and every policy that looks at load sees it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from radixmesh.blocks import Namespace, block_keys, pack_ids
from router.fleet.ask import Ask
from router.fleet.changes import Stored
from router.fleet.replica import Reported
from router.fleet.workload import Report
from router.policy.choice import View
from router.policy.policies import POLICIES
from tests.fakes.fleet import Output, spec
from tests.fakes.group_link import INFO, FakeFleet

SEED = Namespace(model="tiny", fingerprint="f1").seed()
PROMPT = list(range(100, 166))  # 16 blocks, and a beginning of one
BLOCKS = INFO.kv_blocks
# Without a session this one goes by load, too.
BY_LOAD = ("price", "cache_aware", "least_load", "consistent_hash")
BY_CACHE = ("price", "cache_aware")
# Whether it looks at loads or not, it must not prefer the first in the list.
ALL = tuple(POLICIES)


def keys(ids: Sequence[int]) -> list[int]:
    return block_keys(pack_ids(ids), block_tokens=4, seed=SEED)


def ask(ids: Sequence[int] = PROMPT, *, session: str = "") -> Ask:
    return Ask(model="tiny", ids=pack_ids(ids), fingerprint="f1", max_tokens=16, session=session)


def distinct(number: int, length: int = 64) -> list[int]:
    """A prompt that shares no block with another number's."""
    return list(range(number * 10_000, number * 10_000 + length))


def four(policy: str) -> FakeFleet:
    """One group of four idle replicas."""
    fake = FakeFleet("a", policy=POLICIES[policy]())
    fake.links["a"].up(dp=4)
    return fake


def report(fake: FakeFleet, rank: int, **load: float) -> None:
    said = Report(**{"free_blocks": BLOCKS, **load})  # type: ignore[arg-type]
    fake.links["a"].events.on_report(rank, 1, said)


@pytest.mark.parametrize("policy", BY_LOAD)
def test_a_burst_is_even_before_anything_was_answered(policy: str) -> None:
    fake = four(policy)
    ranks = Counter(fake.fleet.place(ask(distinct(n))).dp_rank for n in range(64))
    assert set(ranks.values()) == {16}


def test_the_better_of_two_is_nearly_even() -> None:
    fake = four("power_of_two")
    ranks = Counter(fake.fleet.place(ask(distinct(n))).dp_rank for n in range(64))
    assert max(ranks.values()) - min(ranks.values()) <= 4


@pytest.mark.parametrize("policy", BY_LOAD)
def test_reports_that_have_not_seen_a_burst_do_not_hide_it(policy: str) -> None:
    fake = four(policy)
    ranks: Counter[int] = Counter()
    for number in range(64):
        ranks[fake.fleet.place(ask(distinct(number))).dp_rank] += 1
        for rank in range(4):
            report(fake, rank)
    assert max(ranks.values()) - min(ranks.values()) <= 1


@pytest.mark.parametrize("policy", ALL)
def test_who_is_idle_gets_its_part_whatever_its_number(policy: str) -> None:
    fake = four(policy)
    ranks: Counter[int] = Counter()
    for number in range(400):
        booking = fake.fleet.place(ask(distinct(number)))
        ranks[booking.dp_rank] += 1
        booking.release()
    assert min(ranks.values()) >= 60


def test_a_burst_of_long_and_short_prompts_is_even_in_tokens() -> None:
    """In turn, so that to count requests would put all long ones on two replicas."""
    fake = four("price")
    tokens: Counter[int] = Counter()
    for number in range(64):
        length = 2_000 if number % 2 else 100
        tokens[fake.fleet.place(ask(distinct(number, length))).dp_rank] += length
    assert max(tokens.values()) - min(tokens.values()) <= 2_000


@pytest.mark.parametrize("down", [Reported.DOWN, Reported.DRAINING])
@pytest.mark.parametrize("policy", ALL)
def test_who_takes_nothing_is_never_chosen_though_idle_and_warm(
    policy: str, down: Reported
) -> None:
    fake = four(policy)
    fake.links["a"].holds(2, keys(PROMPT))
    for rank in (0, 1, 3):
        report(fake, rank, running=50, waiting=9, uncached_tokens=9_000)
    fake.links["a"].events.on_status(2, 1, down)
    asks = [ask(session=f"s{number}") for number in range(40)]
    asks += [ask(distinct(number)) for number in range(40)]
    assert {fake.fleet.place(each).dp_rank for each in asks} <= {0, 1, 3}


@pytest.mark.parametrize("policy", ["price", "cache_aware", "least_load", "power_of_two"])
def test_an_empty_cache_is_no_reason_to_go_where_nothing_moves(policy: str) -> None:
    """Rank 0 is stuck and holds nothing. The others are full of blocks and finish at once."""
    fake = four(policy)
    for rank in (1, 2, 3):
        fake.links["a"].holds(rank, keys(distinct(900 + rank, 4 * (BLOCKS - 6))))
    ranks = []
    for number in range(60):
        fake.clock.advance(0.2)
        for rank in (1, 2, 3):
            report(fake, rank)
        booking = fake.fleet.place(ask(distinct(number)))
        ranks.append(booking.dp_rank)
        booking.charge.entry_ids.append(number)
        if booking.dp_rank != 0:
            booking.release()
    assert ranks[:30].count(0) <= 3
    assert ranks[30:].count(0) == 0


@pytest.mark.parametrize("held", [0, 4, 15])
def test_load_counts_for_a_miss_and_for_every_hit(held: int) -> None:
    """Rank 0 is busy and its cache small; what it holds of a prompt is dear all the same."""
    fake = four("price")
    fake.links["a"].holds(0, keys(PROMPT)[:held])
    report(fake, 0, running=60, waiting=20, uncached_tokens=20_000)
    for rank in (1, 2, 3):
        fake.links["a"].holds(rank, keys(distinct(900 + rank, 4 * (BLOCKS - 6))))
        report(fake, rank)
    assert 0 not in {fake.fleet.place(ask()).dp_rank for _ in range(20)}


class Sessions:
    """Eight conversations, two at home at each of four replicas, which store what they are sent."""

    def __init__(self, fake: FakeFleet) -> None:
        self.fake = fake
        self.homes = {number: number % 4 for number in range(8)}
        self._ids = {number: distinct(number, 2_001) for number in self.homes}
        self._told: Counter[int] = Counter()
        for number, home in self.homes.items():
            self._store(home, 0, keys(self._ids[number]))

    def _store(self, rank: int, parent: int, fresh: list[int]) -> None:
        self._told[rank] += 1
        change = Stored(parent, fresh)
        self.fake.links["a"].events.on_change(rank, 1, self._told[rank], change)

    def turn(self, number: int) -> int:
        """Send what was said so far and a little more; return where it went."""
        self._ids[number] += range(9_000_000, 9_000_040)
        chain = keys(self._ids[number])
        booking = self.fake.fleet.place(ask(self._ids[number]))
        booking.release()
        known = booking.predicted_blocks
        self._store(booking.dp_rank, chain[known - 1] if known else 0, chain[known:])
        return booking.dp_rank


def test_only_sessions_whose_home_is_overloaded_move() -> None:
    fake = four("price")
    sessions = Sessions(fake)
    # One long request decodes at home: that moves nobody.
    report(fake, 0, running=1)
    assert {number: sessions.turn(number) for number in sessions.homes} == sessions.homes
    # Home is swamped: its own two sessions move, and all others stay.
    for _ in range(4):
        report(fake, 0, running=64, waiting=40, uncached_tokens=80_000)
        places = {number: sessions.turn(number) for number in sessions.homes}
        moved = {number for number in places if places[number] != sessions.homes[number]}
        assert moved == {0, 4}
    assert {view.view for view in fake.fleet.replicas()} == {View.EXACT}


def test_as_a_home_fills_its_advantage_shrinks_in_small_steps() -> None:
    fake = four("price")
    fake.links["a"].holds(0, keys(PROMPT))
    advantages = []
    for queued in range(0, 4_000, 20):
        report(fake, 0, uncached_tokens=queued, waiting=1)
        prices = {price.dp_rank: price.total_s for price in fake.fleet.explain(ask())}
        advantages.append(min(prices[rank] for rank in (1, 2, 3)) - prices[0])
    assert advantages[0] > 0 > advantages[-1]
    steps = [before - after for before, after in pairwise(advantages)]
    assert all(0 < step < (advantages[0] - advantages[-1]) / 50 for step in steps)


@pytest.mark.parametrize("policy", BY_CACHE)
def test_the_first_request_into_an_empty_fleet_is_what_the_second_one_finds(policy: str) -> None:
    fake = four(policy)
    first = fake.fleet.place(ask())
    assert first.predicted_blocks == 0
    assert fake.fleet.place(ask()).dp_rank == first.dp_rank, "before anything is told"
    fake.links["a"].events.on_change(first.dp_rank, 1, 1, Stored(0, keys(PROMPT)))
    first.release()
    assert {fake.fleet.place(ask()).dp_rank for _ in range(8)} == {first.dp_rank}


@pytest.mark.parametrize("policy", BY_CACHE)
def test_a_prefix_short_of_any_threshold_is_learned_too(policy: str) -> None:
    """A tenth of the prompt is known: the rest is new, and known from then on."""
    fake = four(policy)
    fake.links["a"].holds(1, keys(PROMPT)[:1])
    booking = fake.fleet.place(ask())
    again = fake.fleet.place(ask())
    assert (again.dp_rank, again.predicted_blocks) == (booking.dp_rank, 16)


def test_a_session_is_not_sent_away_for_the_load_that_others_bring() -> None:
    fake = four("consistent_hash")
    home = fake.fleet.place(ask(session="light")).dp_rank
    report(fake, home, running=64, waiting=500, uncached_tokens=500_000)
    for number in range(50):
        fake.fleet.place(ask(distinct(number), session=f"other {number}"))
    assert {fake.fleet.place(ask(session="light")).dp_rank for _ in range(20)} == {home}


def test_sessions_are_spread_and_only_those_of_who_leaves_move() -> None:
    fake = four("consistent_hash")

    def places() -> dict[int, int]:
        asks = {number: ask(session=f"s{number}") for number in range(200)}
        return {number: fake.fleet.place(each).dp_rank for number, each in asks.items()}

    before = places()
    assert min(Counter(before.values()).values()) >= 30
    fake.links["a"].events.on_status(3, 1, Reported.DOWN)
    after = places()
    assert {number for number in before if before[number] != after[number]} == {
        number for number, rank in before.items() if rank == 3
    }
    fake.links["a"].up(dp=4, incarnation=2)
    assert places() == before


def test_the_gate_of_cache_aware_gives_affinity_up_only_beyond_both_of_its_bounds() -> None:
    fake = four("cache_aware")
    fake.links["a"].holds(0, keys(PROMPT))
    for running, stays in ((64, True), (66, False)):
        report(fake, 0, running=running)
        booking = fake.fleet.place(ask())
        assert (booking.dp_rank == 0) is stays
        booking.release()
    for rank in (1, 2, 3):
        report(fake, rank, running=200)
    report(fake, 0, running=290)  # 90 more, and not half as many again
    assert fake.fleet.place(ask()).dp_rank == 0


def test_what_starts_at_a_replica_that_has_retired_hurts_nobody() -> None:
    fake = four("round_robin")
    bookings = [fake.fleet.place(ask()) for _ in range(4)]
    for booking in bookings:
        fake.fleet.submit(booking, spec(PROMPT), Output())
    entries = list(fake.links["a"].entries.values())
    fake.links["a"].events.on_info(replace(INFO, dp=2))
    for entry in entries:
        entry.on_started(16, 0.0)
    assert [view.dp_rank for view in fake.fleet.replicas()] == [0, 1]
