"""At once, but not too often."""

import asyncio

from router.discovery.throttle import Throttle


async def test_one_call_is_done_at_once() -> None:
    done: list[int] = []
    Throttle(10.0, lambda: done.append(1))()
    assert done == [1]


async def test_calls_that_come_too_soon_become_one_that_is_not_forgotten() -> None:
    done = asyncio.Semaphore(0)
    throttle = Throttle(0.02, done.release)
    for _ in range(100):
        throttle()
    async with asyncio.timeout(5):
        await done.acquire()
        await done.acquire()
    await asyncio.sleep(0.05)
    assert done.locked()


async def test_one_that_is_cancelled_is_not_done_and_a_later_one_is() -> None:
    done: list[int] = []
    throttle = Throttle(0.02, lambda: done.append(1))
    throttle()
    throttle()
    throttle.cancel()
    await asyncio.sleep(0.04)
    assert done == [1]
    throttle()
    assert done == [1, 1]
