"""Many fake worker groups in one process, for `bench.frames`: they only send frames.

    python -m bench.groups COUNT --interval S --step-ms MS --fingerprint F --model NAME

Prints one line of JSON with their addresses, then one with what was sent for every line
that it reads; ends with its input. Each group has one replica, reports its load every
`--interval` seconds and proves its cache once a second, as real fronts do, and sends one
frame for each step of all its outputs.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from radixmesh.blocks import pack_ids
from radixmesh.rpc.link import Lane, LinkLimits
from radixmesh.worker.v1.worker_service_pb2 import AttachResponse, Step
from tests.fakes.worker import LENGTH, FakeWorker

PROOF_S = 1.0


class Group(FakeWorker):
    """A group whose steps are one frame each."""

    loads = 0
    steps = 0

    def prove(self) -> None:
        """Send the load."""
        for handler in self._handlers:
            handler.session.send(AttachResponse(loads=[self._load(handler)]), Lane.CONTROL)
            self.loads += 1

    async def prove_cache(self) -> None:
        """Send a proof of the cache, again and again."""
        while True:
            await asyncio.sleep(PROOF_S)
            for handler in self._handlers:
                digests = [replica.cache.digest() for replica in self.replicas]
                handler.session.send(AttachResponse(digests=digests), Lane.FEED)

    def step(self) -> int:
        """Send every output's next id, all in one frame."""
        [replica] = self.replicas
        runs = list(replica.runs)
        if not runs:
            return 0
        frame = Step(dp_rank=0, incarnation=replica.cache.incarnation)
        for run in runs:
            self._begin(0, run)
            frame.entry_ids.append(run.submit.entry_id)
            frame.positions.append(run.position)
            frame.counts.append(1)
            frame.token_ids += pack_ids([run.ids[run.position]])
            run.position += 1
            ended = run.position >= run.submit.sampling.max_tokens
            frame.finishes.append(LENGTH if ended else 0)  # type: ignore[arg-type]
            if ended:
                self._drop(run.handler, run.submit.entry_id)
                run.handler.session.close(run.submit.entry_id)
        runs[0].handler.session.send(AttachResponse(steps=[frame]), Lane.CONTROL)
        self.steps += 1
        return len(runs)


async def serve(options: argparse.Namespace) -> None:
    """Run the groups until the input ends."""
    groups = [
        Group(
            tick_s=options.interval,
            step_s=options.step_ms / 1000,
            limits=LinkLimits(),
            fingerprint=options.fingerprint,
            model=options.model,
            max_running=256,
            vocab_size=0,
        )
        for _ in range(options.count)
    ]
    async with AsyncExitStack() as stack:
        proofs = await stack.enter_async_context(asyncio.TaskGroup())
        for group in groups:
            await stack.enter_async_context(group)
        proving = [proofs.create_task(group.prove_cache()) for group in groups]
        print(json.dumps([group.address for group in groups]), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(sent(groups)), flush=True)
        for task in proving:
            task.cancel()


def sent(groups: Sequence[Group]) -> dict[str, int]:
    """Return how many frames of each kind all groups have sent."""
    return {
        "loads": sum(group.loads for group in groups),
        "steps": sum(group.steps for group in groups),
    }


def main() -> None:
    """Run the groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--fingerprint", default="")
    parser.add_argument("--model", default="tiny")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
