"""A replica that fails or is late gets no new work: who in the fleet is left out, and who sees."""

import asyncio
import functools
import gc
import itertools
import operator
from collections import Counter
from collections.abc import Sequence

import pytest

from radixmesh.blocks import Namespace, block_keys, pack_ids
from radixmesh.errors import (
    DeadlineExceeded,
    Draining,
    GroupLost,
    InternalError,
    LinkLost,
    LinkOverloaded,
    MeshError,
    PromptTooLong,
    QueueFull,
    RankDesync,
)
from router.fleet.ask import Ask
from router.fleet.breaker import BreakerLimits
from router.fleet.changes import Digest
from router.fleet.fitness import Judges, Stance
from router.fleet.replica import Reported
from router.fleet.views import Phase
from router.fleet.worker_link import Entry
from router.fleet.workload import Report
from tests.fakes.fleet import Output, spec
from tests.fakes.group_link import FakeFleet

PROMPT = list(range(100, 166))
SEED = Namespace(model="tiny", fingerprint="f1").seed()
LIMITS = BreakerLimits()
NEW = itertools.count(1000)  # first ids of prompts that nobody has seen


def ask(ids: Sequence[int] = PROMPT, *, resume: bool = False) -> Ask:
    return Ask(model="tiny", ids=pack_ids(ids), fingerprint="f1", max_tokens=16, resume=resume)


def send(fake: FakeFleet, wanted: Ask | None = None) -> Entry:
    """Place and send one request."""
    booking = fake.fleet.place(wanted or ask())
    fake.fleet.submit(booking, spec(PROMPT), Output())
    link = fake.links[booking.group_id]
    return link.entries[link.last_entry]


def send_to(fake: FakeFleet, group: str, *, rank: int = 0) -> Entry:
    """Send one request there, for the sake of what becomes of it."""
    wanted = Ask(
        model="tiny",
        ids=pack_ids(PROMPT),
        fingerprint="f1",
        max_tokens=16,
        hint_group=group,
        hint_dp_rank=rank,
    )
    entry = send(fake, wanted)
    assert (entry.booking.group_id, entry.booking.dp_rank) == (group, rank)
    return entry


def fail(fake: FakeFleet, group: str, error: MeshError, *, times: int = 1) -> None:
    for _ in range(times):
        fake.links[group].fail(send_to(fake, group), error)


def break_(fake: FakeFleet, group: str) -> None:
    fail(fake, group, InternalError("bug"), times=LIMITS.failures)


def reasons(fake: FakeFleet) -> dict[str, str]:
    return {row.group_id: row.reason for row in fake.fleet.replicas()}


@pytest.fixture
def three() -> FakeFleet:
    fake = FakeFleet("a", "b", "c")
    for link in fake.links.values():
        link.up()
    return fake


def places(fake: FakeFleet, count: int = 30) -> set[str]:
    bookings = [fake.fleet.place(ask([next(NEW), *PROMPT])) for _ in range(count)]
    for booking in bookings:
        booking.release()
    return {booking.group_id for booking in bookings}


@pytest.mark.parametrize("error", [GroupLost("x"), RankDesync("x"), InternalError("x")])
def test_a_replica_that_fails_again_and_again_gets_no_new_work(
    three: FakeFleet, error: MeshError
) -> None:
    fail(three, "b", error, times=LIMITS.failures - 1)
    assert places(three) == {"a", "b", "c"}
    fail(three, "b", error)
    assert places(three) == {"a", "c"}
    row = next(row for row in three.fleet.replicas() if row.group_id == "b")
    assert row.phase is Phase.READY
    assert row.reason == "it failed 5 times in a row; tried again in 10 s"
    price = next(price for price in three.fleet.explain(ask()) if price.group_id == "b")
    assert not price.eligible
    assert price.reason.startswith("it failed 5 times")
    assert three.fleet.count_stances(Stance.OPEN) == 1
    assert three.fleet.count_stances(Stance.FIT) == 2


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("x"),
        LinkOverloaded("x"),
        Draining("x"),
        PromptTooLong("x"),
        DeadlineExceeded("x"),
        LinkLost("x"),
    ],
)
def test_back_pressure_and_faults_of_requests_and_links_open_nothing(
    three: FakeFleet, error: MeshError
) -> None:
    fail(three, "b", error, times=50)
    assert places(three) == {"a", "b", "c"}


def test_requests_that_are_cancelled_open_nothing(three: FakeFleet) -> None:
    for _ in range(50):
        entry = send_to(three, "b")
        three.links["b"].cancel(entry)
    assert places(three) == {"a", "b", "c"}


def test_after_a_while_one_request_tries_it(three: FakeFleet) -> None:
    break_(three, "b")
    three.pass_time(LIMITS.open_s)
    # All at once: one of them goes there, however many there are.
    entries = [send(three, ask([next(NEW), *PROMPT])) for _ in range(60)]
    shares = Counter(entry.booking.group_id for entry in entries)
    assert shares["b"] == 1
    assert three.fleet.count_stances(Stance.HALF_OPEN) == 1
    probe = next(entry for entry in entries if entry.booking.group_id == "b")
    three.links["b"].answer(probe)
    assert reasons(three)["b"] == ""
    assert "b" in places(three, 200)


def test_a_probe_that_fails_or_leaves_says_what_it_says(three: FakeFleet) -> None:
    break_(three, "b")
    three.pass_time(LIMITS.open_s)
    probe = send_to(three, "b")
    assert places(three) == {"a", "c"}
    three.links["b"].cancel(probe)
    assert "b" in places(three)
    three.links["b"].fail(send_to(three, "b"), InternalError("bug"))
    three.pass_time(LIMITS.open_s)
    assert places(three) == {"a", "c"}
    three.pass_time(LIMITS.open_s)
    assert "b" in places(three)


def test_a_probe_that_is_never_sent_makes_room_when_its_lease_ends(three: FakeFleet) -> None:
    break_(three, "b")
    three.pass_time(LIMITS.open_s)
    booking = next(
        booking
        for booking in (three.fleet.place(ask([next(NEW), *PROMPT])) for _ in range(60))
        if booking.group_id == "b"
    )
    three.pass_time(11.0)
    assert booking.released
    assert "b" in places(three)


def test_a_new_life_of_a_replica_is_a_new_breaker(three: FakeFleet) -> None:
    break_(three, "b")
    three.links["b"].up(incarnation=2)
    assert reasons(three)["b"] == ""
    assert places(three) == {"a", "b", "c"}


def test_a_link_that_comes_back_to_the_same_life_brings_no_pardon(three: FakeFleet) -> None:
    break_(three, "b")
    three.links["b"].events.on_down(LinkLost("cut"))
    three.links["b"].up(incarnation=1)
    assert places(three) == {"a", "c"}


def test_when_all_have_failed_the_one_that_failed_longest_ago_is_tried(three: FakeFleet) -> None:
    for group in ("c", "a", "b"):
        break_(three, group)
        three.clock.advance(1.0)
    assert three.fleet._room("tiny") == (8, True)
    entry = send(three)
    assert entry.booking.group_id == "c"
    three.links["c"].fail(entry, InternalError("bug"))
    three.clock.advance(0.1)
    entry = send(three)
    assert entry.booking.group_id == "a"
    assert send(three, ask(resume=True)).booking.group_id == "a"
    three.links["a"].finish(entry)
    assert places(three) == {"a"}


def test_the_only_replica_is_never_left_out() -> None:
    fake = FakeFleet("a")
    fake.links["a"].up()
    break_(fake, "a")
    assert reasons(fake)["a"].startswith("it failed")
    assert places(fake) == {"a"}


async def test_who_waits_for_a_replica_does_not_wait_for_a_breaker() -> None:
    fake = FakeFleet("a")
    fake.links["a"].up()
    break_(fake, "a")
    async with asyncio.timeout(1):
        await fake.fleet.wait_ready("tiny")
        await fake.fleet.wait_ready("tiny", resume=True)


def test_resumes_do_not_go_to_a_failing_replica_because_the_others_are_full(
    three: FakeFleet,
) -> None:
    break_(three, "b")
    entries = [send(three, ask(resume=True)) for _ in range(16)]
    assert {entry.booking.group_id for entry in entries} == {"a", "c"}
    with pytest.raises(MeshError):
        three.fleet.place(ask(resume=True))


def test_a_replica_that_answers_late_alone_gets_no_new_work() -> None:
    fake = FakeFleet("a", "b", "c")
    for link in fake.links.values():
        link.up()
    for _ in range(20):
        entries = {group: send_to(fake, group) for group in fake.links if not reasons(fake)[group]}
        fake.pass_time(0.1)
        for group in entries.keys() - {"b"}:
            fake.links[group].finish(entries[group])
        fake.pass_time(3.0)
        if "b" in entries:
            fake.links["b"].finish(entries["b"])
    assert places(fake) == {"a", "c"}
    assert "much later than its siblings" in reasons(fake)["b"]
    assert fake.fleet.count_stances(Stance.EJECTED) == 1


def test_a_wrong_guess_of_what_is_cached_is_not_held_against_a_replica() -> None:
    fake = FakeFleet("a", "b", "c")
    keys = block_keys(pack_ids(PROMPT), block_tokens=4, seed=SEED)
    for link in fake.links.values():
        link.up()
        link.holds(0, keys)
        link.events.on_report(0, 1, Report(free_blocks=4096, prefill_rate=22.0))
    # Of 66 ids the router believes that 64 are there. In "b" they are not: 3 s instead of 0.1.
    for _ in range(12):
        for group, cached, seconds in (("a", 64, 0.1), ("b", 0, 3.0), ("c", 64, 0.1)):
            entry = send_to(fake, group)
            assert entry.booking.predicted_blocks == 16
            entry.on_started(cached, 0.0)
            fake.clock.advance(seconds)
            fake.links[group].finish(entry)
            fake.links[group].events.on_digest(0, 1, Digest(0, len(keys), xor(keys)))
    assert reasons(fake) == {"a": "", "b": "", "c": ""}


def xor(keys: Sequence[int]) -> int:
    return functools.reduce(operator.xor, keys)


def test_silence_is_told_from_work() -> None:
    fake = FakeFleet("a")
    fake.links["a"].up()
    events = fake.links["a"].events
    booking = send(fake).booking
    fake.clock.advance(5.0)
    assert booking.silent_s() == 5.0
    events.on_report(0, 1, Report(waiting=1, free_blocks=4096))
    assert booking.silent_s() == 0.0
    for _ in range(20):
        fake.clock.advance(1.0)
        events.on_report(0, 1, Report(waiting=1, free_blocks=4096))
    assert booking.silent_s() == 20.0
    events.on_step(0, 1)
    assert booking.silent_s() == 0.0
    fake.clock.advance(3.0)
    events.on_step(0, 99)
    assert booking.silent_s() == 3.0
    events.on_status(0, 1, Reported.DRAINING)
    fake.clock.advance(50.0)
    assert booking.silent_s() == 0.0
    events.on_status(0, 1, Reported.UP)
    fake.clock.advance(2.0)
    assert booking.silent_s() == 2.0


def test_lives_that_ended_and_models_that_left_are_judged_no_more() -> None:
    judges = Judges()
    fake = FakeFleet("a", "b", judges=judges)
    for incarnation in range(1, 200):
        for link in fake.links.values():
            link.up(incarnation=incarnation)
    fake.links["b"].events.on_status(0, 199, Reported.DOWN)
    assert len(judges._models["tiny"]) == 1
    for group in ("a", "b"):
        fake.fleet.remove_group(group)
    gc.collect()
    assert not judges._models
