"""What of the SDK is public, and how it decides to try again."""

import inspect
import random
import types

import radixmesh.client as sdk
from radixmesh.client import AsyncClient, AsyncFleetClient, Client, FleetClient, Retry
from radixmesh.errors import GroupLost, PromptTooLong, QueueFull, RateLimited, ServiceUnavailable


def test_all_names_what_is_public() -> None:
    public = {
        name
        for name, value in vars(sdk).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(sdk.__all__)


def test_both_flavours_have_the_same_methods_and_parameters() -> None:
    for blocking, asynchronous in ((Client, AsyncClient), (FleetClient, AsyncFleetClient)):
        for name, method in inspect.getmembers(blocking, inspect.isfunction):
            if name.startswith("__"):
                continue
            other = getattr(asynchronous, name)
            assert list(inspect.signature(method).parameters) == list(
                inspect.signature(other).parameters
            ), name


def test_pauses_double_and_stay_below_their_bound() -> None:
    retry = Retry(attempts=10, first_pause_s=1.0, longest_pause_s=5.0, rng=random.Random(1))
    error = GroupLost("lost", retry_after_s=0.001)
    pauses = [retry.pause(error, attempt) or 0.0 for attempt in range(1, 10)]
    assert 0.5 <= pauses[0] <= 1.5
    assert 1.0 <= pauses[1] <= 3.0
    assert max(pauses) == 5.0


def test_the_servers_hint_is_the_least_pause() -> None:
    retry = Retry(first_pause_s=0.001, longest_pause_s=5.0)
    assert retry.pause(QueueFull("full", retry_after_s=2.0), 1) == 2.0
    assert retry.pause(ServiceUnavailable("away", retry_after_s=60.0), 1) == 5.0


def test_who_is_told_to_come_back_much_later_is_not_kept_waiting() -> None:
    assert Retry().pause(RateLimited("used up", retry_after_s=60.0), 1) is None
    assert Retry().pause(RateLimited("used up", retry_after_s=4.0), 1) == 4.0


def test_only_what_may_pass_by_itself_is_tried_again() -> None:
    assert Retry().pause(PromptTooLong("long"), 1) is None
    assert Retry(attempts=1).pause(QueueFull("full"), 1) is None
