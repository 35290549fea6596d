"""Requests that found no replica: interrupted streams first, no more than fit, nobody forgotten."""

import asyncio

from router.fleet.waiting import Waiters


class Room:
    """What a model could take, as told."""

    def __init__(self) -> None:
        self.resumes = 0
        self.news = False

    def __call__(self, model: str) -> tuple[int, bool]:
        return (self.resumes, self.news) if model == "tiny" else (0, False)


async def waiting(
    waiters: Waiters, woken: list[str], *names: str, model: str = "tiny"
) -> list[asyncio.Task[None]]:
    """Tasks that wait and then write their names; those that begin with r are resumes."""

    async def one(name: str) -> None:
        await waiters.wait(model, resume=name.startswith("r"))
        woken.append(name)

    tasks = [asyncio.get_running_loop().create_task(one(name)) for name in names]
    await settle()
    return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_interrupted_streams_are_woken_before_new_work() -> None:
    room, woken = Room(), list[str]()
    waiters = Waiters(room)
    tasks = await waiting(waiters, woken, "n1", "n2", "r1", "r2")
    room.resumes, room.news = 8, True
    waiters.wake()
    await asyncio.gather(*tasks)
    assert woken == ["r1", "r2", "n1", "n2"]
    assert len(waiters) == 0


async def test_new_work_waits_while_interrupted_streams_do() -> None:
    room, woken = Room(), list[str]()
    waiters = Waiters(room)
    tasks = await waiting(waiters, woken, "r1", "r2", "r3", "n1")
    room.resumes, room.news = 2, True
    waiters.wake()
    await settle()
    assert woken == ["r1", "r2"]
    waiters.wake()
    await asyncio.gather(*tasks)
    assert woken == ["r1", "r2", "r3", "n1"]


async def test_who_comes_when_there_is_room_does_not_wait() -> None:
    room, woken = Room(), list[str]()
    room.resumes, room.news = 1, True
    await asyncio.gather(*await waiting(Waiters(room), woken, "n1"))
    assert woken == ["n1"]


async def test_who_gives_up_is_forgotten() -> None:
    room, woken = Room(), list[str]()
    waiters = Waiters(room)
    tasks = await waiting(waiters, woken, "r1", "n1")
    tasks[0].cancel()
    await settle()
    room.news = True
    waiters.wake()
    await tasks[1]
    assert woken == ["n1"]
    assert len(waiters) == 0


async def test_models_do_not_wake_one_another() -> None:
    room, woken = Room(), list[str]()
    waiters = Waiters(room)
    other = await waiting(waiters, woken, "n1", model="other")
    room.news = True
    waiters.wake()
    await settle()
    assert woken == []
    other[0].cancel()
    await settle()
    assert len(waiters) == 0
