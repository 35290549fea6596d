"""The common pace: one strike wakes all that wait, and nothing ticks when nobody does."""

import asyncio

from radixmesh.blocks import pack_ids
from router.beat import Beat
from router.journal import Fresh
from router.request import Delta
from router.stream import Stream


async def begun(beat: Beat) -> Stream:
    """A stream whose first text was taken, with more text that waits."""
    stream = Stream(beat=beat, max_pending_bytes=1 << 20)
    stream.add(0, Fresh("a"))
    await stream.take()
    stream.add(0, Fresh("b", pack_ids([1])))
    return stream


async def test_streams_that_wait_are_woken_by_one_strike() -> None:
    beat = Beat(0.05)
    streams = [await begun(beat) for _ in range(3)]
    assert len(beat) == 3
    first, *others = [asyncio.create_task(stream.take()) for stream in streams]
    async with asyncio.timeout(1):
        await first
    # In the same turn of the loop: nobody waited for a timer of its own.
    assert all(other.done() for other in others)
    assert [other.result() for other in others] == [[Delta(0, "b", pack_ids([1]))]] * 2


async def test_strikes_lie_at_multiples_of_the_interval_whoever_joins_when() -> None:
    loop = asyncio.get_running_loop()
    beat = Beat(0.05)
    async with asyncio.timeout(1):
        for _ in range(3):
            began = loop.time()
            wake = asyncio.Event()
            beat.join(wake)
            await wake.wait()
            strike = (began // 0.05 + 1) * 0.05
            assert loop.time() >= strike - 0.001
    assert len(beat) == 0


async def test_a_stream_that_is_read_or_closed_waits_no_more() -> None:
    beat = Beat(60.0)
    read, closed = await begun(beat), await begun(beat)
    read.end()
    assert await read.take() == [Delta(0, "b", pack_ids([1]))]
    closed.close()
    assert len(beat) == 0


async def test_text_that_comes_after_a_whole_interval_goes_at_once() -> None:
    beat = Beat(0.02)
    stream = await begun(beat)
    await stream.take()
    pause = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, pause.set)
    await pause.wait()
    stream.add(0, Fresh("c"))
    assert len(beat) == 0
    assert await stream.take() == [Delta(0, "c", b"")]
