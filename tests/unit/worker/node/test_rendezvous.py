"""Where further hosts come: who is taken, what is lost with a host, and how soon."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from radixmesh.errors import InvalidRequest, LinkLost
from worker.config import RankConfig
from worker.node.agent import Agent
from worker.node.host import Host
from worker.node.line import (
    EndShare,
    Hello,
    Line,
    Message,
    Refused,
    ShareEnded,
    ShareGone,
    ShareStarted,
    StartShare,
    Welcome,
)
from worker.node.rendezvous import Rendezvous
from worker.node.share import Life

SETTINGS = {"tp": "2", "pp": "1"}
LIFE = Life(dp_rank=0, incarnation=77, store_port=5)
SOON = pytest.mark.timeout(5)


class Meeting:
    """A rendezvous of two hosts with a short patience."""

    def __init__(self, rendezvous: Rendezvous, port: int) -> None:
        self.rendezvous = rendezvous
        self.port = port

    @asynccontextmanager
    async def dial(self, *, lost_s: float = 5.0) -> AsyncGenerator[Line, None]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        line = Line(reader, writer, beat_s=0.05, lost_s=lost_s)
        try:
            yield line
        finally:
            line.close()

    @asynccontextmanager
    async def node(self, *, beats: bool = True) -> AsyncGenerator[Line, None]:
        """Node 1, taken."""
        async with self.dial() as line:
            line.send(Hello(1, SETTINGS))
            assert await line.receive() == Welcome()
            beating = asyncio.ensure_future(line.beat() if beats else asyncio.sleep(0))
            try:
                yield line
            finally:
                beating.cancel()


@pytest.fixture
async def meeting() -> AsyncIterator[Meeting]:
    async with aclosing(Rendezvous(2, SETTINGS, beat_s=0.05, lost_s=0.3)) as rendezvous:
        yield Meeting(rendezvous, await rendezvous.listen("127.0.0.1", 0))


async def start(meeting: Meeting, line: Line, *answers: Message) -> None:
    """Take an order to start and answer."""
    order = await line.receive()
    assert order == StartShare(0, 77, 5)
    for answer in answers:
        line.send(answer)


@SOON
async def test_a_replica_waits_for_all_hosts_and_then_starts_on_each(meeting: Meeting) -> None:
    waiting = asyncio.ensure_future(meeting.rendezvous.complete())
    async with meeting.node() as line:
        await waiting
        starting = asyncio.ensure_future(meeting.rendezvous.start(LIFE))
        await start(meeting, line, ShareStarted(77))
        [share] = await starting
        line.send(ShareEnded(77, "rank dp=0 pp=0 tp=1 exited with status 1"))
        assert await share.first_end() == "rank dp=0 pp=0 tp=1 exited with status 1"
        ending = asyncio.ensure_future(share.end(2.5))
        assert await line.receive() == EndShare(77, 2.5)
        line.send(ShareGone(77))
        await ending


@SOON
async def test_a_host_that_cannot_start_its_ranks_says_why(meeting: Meeting) -> None:
    async with meeting.node() as line:
        starting = asyncio.ensure_future(meeting.rendezvous.start(LIFE))
        await start(meeting, line, ShareStarted(77, "no memory"))
        with pytest.raises(ConnectionError, match="no memory"):
            await starting


@SOON
@pytest.mark.parametrize("silent", [False, True], ids=["hangs up", "falls silent"])
async def test_a_lost_host_takes_its_ranks_with_it(meeting: Meeting, silent: bool) -> None:
    async with meeting.node(beats=not silent) as line:
        starting = asyncio.ensure_future(meeting.rendezvous.start(LIFE))
        await start(meeting, line, ShareStarted(77))
        [share] = await starting
        if not silent:
            line.close()
        assert (await share.first_end()).startswith("node 1 is lost: ")
        await share.end(5)
        with pytest.raises(ConnectionError, match="node 1 is lost"):
            await meeting.rendezvous.start(LIFE)


@SOON
async def test_a_beating_host_is_kept_however_long_it_says_nothing_else(meeting: Meeting) -> None:
    async with meeting.node() as line:
        with pytest.raises(TimeoutError):  # the passing of time is what is looked at
            await asyncio.wait_for(line.receive(), 0.9)
        starting = asyncio.ensure_future(meeting.rendezvous.start(LIFE))
        await start(meeting, line, ShareStarted(77))
        assert len(await starting) == 1


@SOON
@pytest.mark.parametrize(
    ("hello", "why", "forever"),
    [
        (Hello(2, SETTINGS), "there are nodes 0 to 1, and no 2", True),
        (Hello(0, SETTINGS), "there are nodes 0 to 1, and no 0", True),
        (Hello(1, {"tp": "4", "pp": "1"}), "tp is '2' at host 0 and '4' here", True),
        (Hello(1, {"tp": "2"}), "pp is '1' at host 0 and None here", True),
    ],
)
async def test_a_host_that_does_not_fit_is_told_why(
    meeting: Meeting, hello: Hello, why: str, forever: bool
) -> None:
    async with meeting.dial() as line:
        line.send(hello)
        assert await line.receive() == Refused(why, forever)
        with pytest.raises(LinkLost):
            await line.receive()


@SOON
async def test_a_second_host_of_the_same_rank_is_refused_until_the_first_is_gone(
    meeting: Meeting,
) -> None:
    async with meeting.node(), meeting.dial() as second:
        second.send(Hello(1, SETTINGS))
        assert await second.receive() == Refused("node 1 is already there", forever=False)


@SOON
@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x03\0\0\0abc", b"\xff" * 64])
async def test_noise_is_hung_up_on_and_harms_nobody(meeting: Meeting, noise: bytes) -> None:
    async with meeting.node() as line:
        reader, writer = await asyncio.open_connection("127.0.0.1", meeting.port)
        writer.write(noise)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        starting = asyncio.ensure_future(meeting.rendezvous.start(LIFE))
        await start(meeting, line, ShareStarted(77))
        assert len(await starting) == 1


@SOON
async def test_an_agent_that_is_refused_for_ever_ends_with_the_reason(meeting: Meeting) -> None:
    async with aclosing(Host(RankConfig(model_dir=""), nnodes=2, node_rank=1)) as host:
        agent = Agent(host, 1, {"tp": "3", "pp": "1"}, beat_s=0.05, lost_s=0.3)
        with pytest.raises(InvalidRequest, match="tp is '2' at host 0 and '3' here"):
            await agent.run("127.0.0.1", meeting.port)


@SOON
async def test_an_agent_comes_again_after_host_0_was_lost(meeting: Meeting) -> None:
    async with aclosing(Host(RankConfig(model_dir=""), nnodes=2, node_rank=1)) as host:
        agent = Agent(host, 1, SETTINGS, beat_s=0.05, lost_s=0.3)
        running = asyncio.ensure_future(agent.run("127.0.0.1", meeting.port))
        await meeting.rendezvous.complete()
        await meeting.rendezvous.aclose()
        async with aclosing(Rendezvous(2, SETTINGS, beat_s=0.05, lost_s=0.3)) as again:
            await again.listen("127.0.0.1", meeting.port)
            await again.complete()
            running.cancel()
            await asyncio.wait([running])
