"""What does a step cost before anything is computed: the scheduler, and telling the ranks?

    python -m bench.worker_step [--steps 300] [--json OUT]

Three tables of microseconds, median (least):

1. an empty record told to tp ranks and their marks heard, by each carrier;
2. the scheduler's turn (apply, plan, commit, output) at 1, 64 and 256 running requests,
   with short and with long histories: it must not grow with them;
3. a whole step of real rank processes on the fake engine, told from outside.

Goals: 1 under 150 us, a plan of 256 running under 1 ms. Trust ratios; nothing else may
run beside it.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from radixmesh.blocks import Namespace, pack_ids
from radixmesh.models import resolve
from worker.config import FakeConfig, RankConfig
from worker.engine.engine import StepPlan, StepResult
from worker.group.carrier import PeerLost, Root
from worker.group.framing import FrameSplitter, frame
from worker.group.gloo import GlooLeaf, GlooRoot
from worker.group.local import LocalLeaf, LocalRoot
from worker.group.record import StepRecord, encode_record
from worker.kvcache.radix import PrefixCache
from worker.node.launcher import RankLauncher
from worker.parallel.world import leave
from worker.request import Add, Outbound, Sampling, StepOutput
from worker.schedule.limits import Limits
from worker.schedule.scheduler import Scheduler

RUNNING = (1, 64, 256)
RANKS = (1, 2, 4)
HISTORIES = (64, 4096)
BLOCK_TOKENS = 16
NAMESPACE = Namespace(
    model="bench", weight_version="", fingerprint="", adapter="", cache_salt=""
).encode()
EMPTY = encode_record(StepRecord(step=0, now_us=0, digest=0, inputs=[]))


def micros(call: Callable[[], object], steps: int) -> list[float]:
    """Return the microseconds of each of so many calls, after a few that are not counted."""
    for _ in range(10):
        call()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def show(times: list[float]) -> str:
    """Return median and least."""
    return f"{statistics.median(times):8.0f} ({min(times):.0f})"


# 1. The broadcast.


def _leaf(sock: socket.socket) -> None:
    leaf = LocalLeaf(sock)
    try:
        while True:
            leaf.mark(len(leaf.receive()))
    except PeerLost:
        return


def _gloo_leaf(config: RankConfig) -> None:
    leaf = GlooLeaf(config)
    try:
        while True:
            leaf.mark(len(leaf.receive()))
    except PeerLost:
        return


@contextmanager
def gloo_root(tp: int) -> Iterator[GlooRoot]:
    """Rank (0, 0)'s end of the gloo carrier, with processes at the other ends."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as store:
        base = RankConfig(
            model_dir="",
            engine="fake",
            tp=tp,
            carrier="gloo",
            store_port=store.getsockname()[1],
        )
        leaves = [
            context.Process(
                target=_gloo_leaf,
                args=(msgspec.structs.replace(base, tp_rank=rank),),
                daemon=True,
            )
            for rank in range(1, tp)
        ]
        for leaf in leaves:
            leaf.start()
        root = GlooRoot(msgspec.structs.replace(base, store_fd=os.dup(store.fileno())))
    try:
        yield root
    finally:
        for leaf in leaves:
            leaf.kill()
            leaf.join()
        leave()


@contextmanager
def local_root(tp: int) -> Iterator[LocalRoot]:
    """Rank (0, 0)'s end of the local carrier, with processes at the other ends."""
    context = multiprocessing.get_context("fork")
    pairs = [socket.socketpair() for _ in range(tp - 1)]
    leaves = [context.Process(target=_leaf, args=(theirs,), daemon=True) for _, theirs in pairs]
    for leaf in leaves:
        leaf.start()
    root = LocalRoot([ours for ours, _ in pairs])
    try:
        yield root
    finally:
        for leaf in leaves:
            leaf.kill()
            leaf.join()
        root.close()


def broadcast(root: Root, tp: int) -> None:
    """Tell an empty record, hear the marks."""
    root.broadcast(EMPTY)
    root.marks(range(1, tp))


# 2. The scheduler.


class Busy:
    """A scheduler with so many requests that decode, each with so many ids before it."""

    def __init__(self, running: int, history: int, steps: int) -> None:
        blocks = running * ((history + steps) // BLOCK_TOKENS + 2)
        config = RankConfig(model_dir="", max_running=running, max_batched_tokens=1 << 20)
        self._cache = PrefixCache(block_count=blocks, block_tokens=BLOCK_TOKENS)
        limits = Limits(
            max_model_len=history + steps + 1,
            max_running=config.max_running,
            max_waiting=running,
            max_batched_tokens=config.max_batched_tokens,
            vocab_size=1 << 20,
            eos_ids=frozenset(),
        )
        self._scheduler = Scheduler(limits, self._cache)
        self._step = 0
        self.plan_us: list[float] = []
        adds = [self._add(number, [number, *range(1, history)], steps) for number in range(running)]
        self._scheduler.apply(adds, now_us=0)
        self._finish(self._scheduler.plan(0))

    def turn(self) -> None:
        """One step; its plan is timed apart."""
        began = time.perf_counter()
        self._scheduler.apply([], now_us=self._step)
        plan = self._scheduler.plan(self._step)
        self.plan_us.append((time.perf_counter() - began) * 1e6)
        self._finish(plan)

    def _finish(self, plan: StepPlan) -> None:
        drawn = sum(row.sampled for row in plan.rows)
        self._scheduler.commit(plan, StepResult([7] * drawn, [0.0] * drawn))
        self._scheduler.take_output(self._step)
        self._step += 1

    @staticmethod
    def _add(number: int, ids: list[int], steps: int) -> Add:
        return Add(
            request_id=number + 1,
            prompt=array("I", ids).tobytes(),
            output=b"",
            sampling=Sampling(seed=1, max_tokens=steps + 20, ignore_eos=True),
            namespace=NAMESPACE,
        )


# 3. Real processes.


async def whole_steps(base: RankConfig, running: int, steps: int) -> list[float]:
    """Return the microseconds between the outputs of real ranks on the fake engine."""
    launcher = RankLauncher(
        msgspec.structs.replace(
            base,
            engine="fake",
            max_running=running,
            max_batched_tokens=4096,
            fake=FakeConfig(kv_blocks=running * (steps // BLOCK_TOKENS + 8)),
            log_level="ERROR",
        )
    )
    ranks = await launcher(0, 1)
    try:
        return await asyncio.to_thread(_drive, ranks.mailbox, running, steps)
    finally:
        ranks.mailbox.close()
        await ranks.end(2.0)
        await launcher.aclose()


def _drive(mailbox: socket.socket, running: int, steps: int) -> list[float]:
    mailbox.settimeout(60)
    messages = _messages(mailbox)
    next(messages)  # ready
    sampling = Sampling(seed=1, max_tokens=steps + 60, ignore_eos=True)
    adds = [
        Add(number + 1, pack_ids([number % 90 + 1, 5, 6]), b"", sampling, NAMESPACE)
        for number in range(running)
    ]
    mailbox.sendall(b"".join(frame(msgspec.msgpack.encode(add)) for add in adds))
    full = (one for one in messages if isinstance(one, StepOutput))
    for output in full:
        if output.load.running == running and len(output.request_ids) == running:
            break
    times, last = [], time.perf_counter()
    for _ in range(steps):
        next(full)
        now = time.perf_counter()
        times.append((now - last) * 1e6)
        last = now
    return times


def _messages(mailbox: socket.socket) -> Iterator[Outbound]:
    decoder = msgspec.msgpack.Decoder(Outbound)
    splitter = FrameSplitter()
    while data := mailbox.recv(1 << 18):
        for body in splitter.feed(data):
            yield decoder.decode(body)


CARRIERS: dict[str, Callable[[int], AbstractContextManager[Root]]] = {
    "local": local_root,
    "gloo": gloo_root,
}


def show_broadcasts(steps: int) -> dict[str, float]:
    """Print the first table; return its medians."""
    print("an empty record and its marks, us")
    found = {}
    for name, make in CARRIERS.items():
        for tp in RANKS[1:]:
            with make(tp) as root:
                times = micros(partial(broadcast, root, tp), steps)
            found[f"broadcast {name} tp={tp}"] = statistics.median(times)
            print(f"  {name:5}  tp={tp}  {show(times)}")
    return found


def show_plans(steps: int) -> dict[str, float]:
    """Print the second table; return its medians."""
    print("the scheduler, us                  plan            whole turn")
    found = {}
    for running in RUNNING:
        for history in HISTORIES:
            busy = Busy(running, history, steps + 20)
            times = micros(busy.turn, steps)
            found[f"plan running={running} history={history}"] = statistics.median(busy.plan_us)
            row = f"  {running:3} running, {history:4} ids before"
            print(f"{row}{show(busy.plan_us):>16}{show(times):>20}")
    return found


def show_steps(steps: int, model_dir: str) -> dict[str, float]:
    """Print the third table; return its medians."""
    print("a whole step of rank processes, us")
    found = {}
    for tp in RANKS:
        for carrier in CARRIERS if tp > 1 else ("local",):
            config = RankConfig(model_dir=model_dir, tp=tp, carrier=carrier)
            for running in RUNNING:
                times = asyncio.run(whole_steps(config, running, steps))
                found[f"step {carrier} tp={tp} running={running}"] = statistics.median(times)
                print(f"  {carrier:5}  tp={tp}  {running:3} running  {show(times)}")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", default="smollm2", help="whose vocabulary the fake ranks use")
    parser.add_argument("--json", type=Path, help="write the medians here too")
    options = parser.parse_args()
    found = show_broadcasts(options.steps)
    found |= show_plans(options.steps)
    found |= show_steps(options.steps, str(resolve(options.model)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
