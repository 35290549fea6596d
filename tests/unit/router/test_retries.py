"""What lost attempts mean for the next one."""

import pytest

from radixmesh.errors import (
    BY_REASON,
    Draining,
    GroupLost,
    InternalError,
    LinkLost,
    MeshError,
    NoReplicaReady,
    PromptTooLong,
    QueueFull,
    RankDesync,
    RequestPoisoned,
)
from router.retries import FRUITLESS_LIMIT, WITNESS_IDS, Loss, NoSignOfLife, Place, Retries

HERE: Place = ("g0", 0, 1)
THERE: Place = ("g1", 0, 1)


def loss(error: MeshError, place: Place = HERE, *, gained: int = 0, ran: bool = False) -> Loss:
    return Loss(place=place, error=error, sent=ran, accepted=ran, started=ran, gained=gained)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("error", [PromptTooLong("long"), InternalError("bug")])
def test_an_error_that_no_other_place_mends_is_final(error: MeshError, ran: bool) -> None:
    retries = Retries()
    if isinstance(error, InternalError) and not ran:
        retries.note(loss(error))
    with pytest.raises(type(error)):
        retries.note(loss(error, ran=ran))


def test_a_bug_in_taking_a_request_may_be_that_replicas_own() -> None:
    retries = Retries()
    retries.note(loss(InternalError("bug")))
    assert retries.avoid == {HERE}
    assert not retries.shuns(HERE)
    assert not retries.resuming
    with pytest.raises(InternalError):
        retries.note(loss(InternalError("bug"), THERE))


@pytest.mark.parametrize("error", [GroupLost("x"), RankDesync("x"), Draining("x")])
def test_a_place_that_is_gone_is_shunned(error: MeshError) -> None:
    retries = Retries()
    retries.note(loss(error, ran=True))
    assert retries.avoid == {HERE}
    assert retries.shuns(HERE)
    assert not retries.shuns(THERE)
    assert retries.resuming


def test_a_silent_place_is_avoided_and_gone_to_where_there_is_no_other() -> None:
    retries = Retries()
    retries.note(loss(NoSignOfLife("x"), ran=True, gained=3))
    assert retries.avoid == {HERE}
    assert not retries.shuns(HERE)
    assert retries.resuming


def test_progress_forgets_who_was_silent_before_it() -> None:
    retries = Retries()
    retries.note(loss(NoSignOfLife("x"), ran=True))
    retries.note(loss(NoSignOfLife("x"), THERE, ran=True, gained=3))
    assert retries.avoid == {THERE}, "or, when all have been silent once, any is as good"


def test_silence_before_anything_was_accepted_leaves_it_new_work() -> None:
    retries = Retries()
    for number in range(FRUITLESS_LIMIT - 1):
        place = (f"g{number}", 0, 1)
        retries.note(Loss(place=place, error=NoSignOfLife("x"), sent=True))
    assert not retries.resuming
    with pytest.raises(NoSignOfLife):
        retries.note(Loss(place=HERE, error=NoSignOfLife("x"), sent=True))


def test_prefills_that_replicas_never_come_back_from_are_poison_and_stalls_are_not() -> None:
    retries = Retries()
    for _ in range(20):
        retries.note(loss(NoSignOfLife("x"), ran=True, gained=1))
    for _ in range(3):
        retries.note(loss(NoSignOfLife("x"), ran=True))
    with pytest.raises(RequestPoisoned):
        retries.note(loss(NoSignOfLife("x"), ran=True))


def test_a_client_hears_of_silence_as_of_a_lost_replica() -> None:
    assert NoSignOfLife.reason == GroupLost.reason
    assert BY_REASON["GROUP_LOST"] is GroupLost


def test_a_cut_link_leaves_no_grudge() -> None:
    retries = Retries()
    retries.note(loss(LinkLost("x"), ran=True, gained=3))
    assert not retries.avoid


@pytest.mark.parametrize("error", [GroupLost("x"), RankDesync("x")])
def test_two_replicas_that_die_at_once_are_poison(error: MeshError) -> None:
    retries = Retries()
    retries.note(loss(error, ran=True, gained=5))
    with pytest.raises(RequestPoisoned):
        retries.note(loss(GroupLost("x"), THERE, ran=True))


def test_replicas_that_die_in_the_step_that_would_accept_the_request_are_poison() -> None:
    retries = Retries()
    retries.note(Loss(place=HERE, error=GroupLost("x"), sent=True))
    with pytest.raises(RequestPoisoned):
        retries.note(Loss(place=THERE, error=GroupLost("x"), sent=True))


def test_a_long_stream_may_witness_some_deaths_but_not_for_ever() -> None:
    retries = Retries()
    for number in range(3):
        retries.note(loss(GroupLost("x"), (f"g{number}", 0, 1), ran=True, gained=WITNESS_IDS))
    with pytest.raises(RequestPoisoned):
        retries.note(loss(GroupLost("x"), THERE, ran=True, gained=WITNESS_IDS))


def test_a_replica_that_was_gone_before_the_request_left_is_no_poison() -> None:
    retries = Retries()
    for number in range(FRUITLESS_LIMIT - 1):
        retries.note(loss(GroupLost("x"), (f"g{number}", 0, 1)))
    assert not retries.resuming


def test_fronts_that_die_at_once_are_poison_and_links_cut_in_mid_stream_are_not() -> None:
    retries = Retries()
    for _ in range(10):
        retries.note(loss(LinkLost("x"), ran=True, gained=1))
    for _ in range(3):
        retries.note(loss(LinkLost("x"), ran=True))
    with pytest.raises(RequestPoisoned):
        retries.note(loss(LinkLost("x"), ran=True))


def test_new_work_is_refused_after_two_full_places() -> None:
    retries = Retries()
    retries.note(loss(QueueFull("x")))
    assert retries.shuns(HERE)
    with pytest.raises(QueueFull):
        retries.note(loss(QueueFull("x"), THERE))


def test_new_work_is_refused_when_the_only_place_is_full() -> None:
    retries = Retries()
    retries.check_room()
    retries.note(loss(QueueFull("x")))
    with pytest.raises(QueueFull):
        retries.check_room()
    assert isinstance(retries.reason(NoReplicaReady("x")), QueueFull)


def test_a_stream_tries_full_places_again_and_waits_longer_each_time() -> None:
    retries = Retries()
    retries.note(loss(GroupLost("x"), THERE, ran=True, gained=2))
    pauses = []
    for _ in range(8):
        retries.note(loss(QueueFull("x")))
        pauses.append(retries.pause_s)
        retries.check_room()
        assert not retries.shuns(HERE)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.0, 1.0)


def test_new_work_that_nobody_takes_is_given_up() -> None:
    retries = Retries()
    for _ in range(FRUITLESS_LIMIT - 1):
        retries.note(loss(LinkLost("x")))
    with pytest.raises(LinkLost):
        retries.note(loss(LinkLost("x")))
    assert isinstance(retries.reason(NoReplicaReady("x")), NoReplicaReady)


def test_progress_clears_what_was_held_against_places() -> None:
    retries = Retries()
    retries.note(loss(GroupLost("x"), THERE, ran=True, gained=2))
    retries.note(loss(QueueFull("x")))
    retries.note(loss(LinkLost("x"), ("g2", 0, 1), ran=True, gained=4))
    assert retries.avoid == {THERE}
    assert retries.pause_s == 0.0
