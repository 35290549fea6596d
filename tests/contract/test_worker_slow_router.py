"""A router that stops reading: it loses feed, never tokens, and ends with a true copy."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from radixmesh.blocks import pack_ids
from radixmesh.common.v1.sampling_pb2 import SamplingParams
from radixmesh.rpc.link import LinkLimits
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.feed_follower import FeedFollower
from tests.fakes.scripted_ranks import Row, ScriptedLauncher, ScriptedRanks
from tests.fakes.worker_front import run_front
from worker.request import LENGTH, CacheChange

# As little room in the transport as it grants, so that what is not read fills the link.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
SMALL = LinkLimits(max_feed_bytes=400_000, peer_timeout_s=60)


class BareRouter:
    """Reads frames only when told to, and answers pings never."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.feed = FeedFollower()
        self.ids: list[int] = []
        self.frames = 0

    async def read_until(self, what: Any) -> None:
        while not what():
            frame = await self.call.read()
            self.frames += 1
            for chunk in frame.snapshots:
                self.feed.take_chunk_message(chunk)
            for event in frame.events:
                self.feed.take_event_message(event)
            for digest in frame.digests:
                self.feed.take_digest_message(digest)
            for step in frame.steps:
                self.ids += memoryview(step.token_ids).cast("I").tolist()


@asynccontextmanager
async def slow(model_dir: Path) -> AsyncGenerator[tuple[BareRouter, ScriptedRanks], None]:
    launcher = ScriptedLauncher()
    async with (
        run_front(model_dir, launch=launcher, limits=SMALL) as address,
        grpc.aio.insecure_channel(address, options=NARROW) as channel,
    ):
        call = WorkerServiceStub(channel).Attach()
        hello = pb.AttachRequest()
        hello.link.hello.peer_name = "router"
        hello.link.hello.instance_id = "bare"
        hello.link.hello.protocol_version = 1
        await call.write(hello)
        router = BareRouter(call)
        await router.read_until(lambda: router.feed.whole)
        yield router, await launcher.incarnation(0, 0)
        call.cancel()


async def test_feed_is_dropped_and_begun_anew_and_tokens_are_whole(model_dir: Path) -> None:
    async with slow(model_dir) as (router, ranks):
        sampling = SamplingParams(seed=1, max_tokens=400)
        submit = pb.Submit(entry_id=1, prompt_ids=pack_ids([5]), sampling=sampling)
        await router.call.write(pb.AttachRequest(submits=[submit]))
        [add] = await ranks.adds(1)
        held: dict[int, int] = {}
        for number in range(400):
            keys = [number * 1_000 + at + 1 for at in range(1_000)]
            held.update(zip(keys, [0, *keys], strict=False))
            finish = LENGTH if number == 399 else 0
            ranks.step(
                [Row(add.request_id, number, [number], finish)], changes=[CacheChange(0, keys)]
            )
            await asyncio.sleep(0.001)
        await router.read_until(lambda: len(router.feed.keys) == len(held))
        assert router.feed.snapshots >= 2, "nothing was dropped: the test provoked nothing"
        assert router.feed.keys == held
        assert router.ids == list(range(400))
        proofs = router.feed.proofs
        await router.read_until(lambda: router.feed.proofs > proofs)
