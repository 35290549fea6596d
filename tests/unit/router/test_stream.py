"""What waits for a client, and when it is handed over."""

import asyncio

import pytest

from radixmesh.blocks import pack_ids
from radixmesh.errors import GroupLost, SlowConsumer
from router.beat import Beat
from router.journal import Fresh
from router.request import Delta
from router.stream import Stream
from tests.fakes.pipeline import finish


def stream(interval_s: float = 0.0, bound: int = 1 << 20) -> Stream:
    return Stream(beat=Beat(interval_s), max_pending_bytes=bound)


def said(text: str, *ids: int) -> Fresh:
    return Fresh(text, pack_ids(ids))


async def test_text_of_one_output_merges_and_outputs_stay_apart() -> None:
    one = stream()
    one.add(0, said("a", 1))
    one.add(1, said("x", 9))
    one.add(0, said("b", 2))
    assert await one.take() == [
        Delta(0, "ab", pack_ids([1, 2])),
        Delta(1, "x", pack_ids([9])),
    ]


async def test_the_first_text_of_each_output_goes_at_once_and_later_text_waits() -> None:
    one = stream(interval_s=60.0)
    one.add(0, said("a"))
    await one.take()
    one.add(0, said("b"))
    waiting = asyncio.create_task(one.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    one.add(1, said("x"))
    assert [event.choice for event in await waiting] == [0, 1]
    one.close()


async def test_later_text_is_handed_over_when_the_interval_is_over() -> None:
    one = stream(interval_s=0.01)
    one.add(0, said("a"))
    await one.take()
    one.add(0, said("b"))
    one.add(0, said("c"))
    async with asyncio.timeout(1):
        assert await one.take() == [Delta(0, "bc", b"")]


async def test_an_end_does_not_wait_and_comes_after_the_text() -> None:
    one = stream(interval_s=60.0)
    one.add(0, said("a"))
    await one.take()
    one.add(0, said("b"))
    one.finish(finish(0))
    one.end()
    assert await one.take() == [Delta(0, "b", b""), finish(0)]
    assert await one.take() == []


async def test_an_error_comes_after_the_text_that_was_certain() -> None:
    one = stream(interval_s=60.0)
    one.add(0, said("a"))
    await one.take()
    one.add(0, said("b"))
    one.fail(GroupLost("gone"))
    assert await one.take() == [Delta(0, "b", b"")]
    with pytest.raises(GroupLost):
        await one.take()


async def test_a_client_too_slow_loses_what_waits() -> None:
    one = stream(bound=40)
    one.add(0, said("12345678"))
    with pytest.raises(SlowConsumer) as error:
        one.add(0, said("123"))
    one.fail(error.value)
    with pytest.raises(SlowConsumer):
        await one.take()
