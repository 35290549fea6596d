"""What does it cost to decide where a request goes, and what does the index behind it cost?

    python -m bench.decision [--blocks 1000000] [--replicas 64] [--rounds 2000]
                             [--no-growth] [--json OUT]

Four tables, on prompts of 4 096 ids of which half begin with one of a few system prompts
and each is held, to some depth, by one to four replicas:

1. a decision, microseconds, median (least): hash the ids, match them, the same with
   bookings in flight, price them at all replicas and choose;
2. changes of the index: million blocks a second of CPU time, stored and removed, by the
   length of a run; and a replica that leaves: the moment, and the sweep after it;
3. bytes a block, by the growth of a process's memory, whole index;
4. growth: the same at more replicas and more blocks.

Goals: a decision under 60 us, 1 M blocks a second, under 150 bytes a block. Trust ratios;
nothing else may run beside it.
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import psutil

from radixmesh.blocks import block_keys
from router.policy.board import Board
from router.policy.choice import Standing, Wish
from router.policy.price import Price
from router.tree.meta_tree import BYTES_PER_KEY, BYTES_PER_RUN, MetaTree

IDS = 4096
BLOCK_TOKENS = 16
BLOCKS = IDS // BLOCK_TOKENS
SYSTEM_BYTES = IDS  # a quarter of a prompt
SYSTEM_PROMPTS = 16
BOOKED = 64
RUNS = (256, 64, 8, 1)
GROWTH = ((64, 1_000_000), (1000, 1_000_000), (64, 10_000_000), (1000, 10_000_000))
UNBOUNDED = 1 << 50
MIB = 1 << 20

Row = dict[str, float]
T = TypeVar("T")


def keys_of(ids: bytes) -> list[int]:
    """Return the block keys of a prompt."""
    return block_keys(ids, block_tokens=BLOCK_TOKENS, seed=1)


class Fleet:
    """An index that was filled as a fleet fills it, with some of its prompts to ask for."""

    def __init__(self, blocks: int, replicas: int) -> None:
        self.chance = Random(1)
        self.tree = MetaTree(budget_bytes=UNBOUNDED)
        self.replicas = [self.tree.join() for _ in range(replicas)]
        self.systems = [self.chance.randbytes(SYSTEM_BYTES) for _ in range(SYSTEM_PROMPTS)]
        self.own: list[bytes] = []
        self.shared: list[bytes] = []
        self.stored = 0
        self.store_s = 0.0
        while len(self.tree) < blocks:
            self._add()

    def _add(self) -> None:
        ids = self.chance.randbytes(4 * IDS)
        shared = self.chance.random() < 0.5
        if shared:
            ids = self.chance.choice(self.systems) + ids[SYSTEM_BYTES:]
        kept = self.shared if shared else self.own
        kept.append(ids)
        if len(kept) > 2000:
            kept.pop(0)
        keys = keys_of(ids)
        for replica in self.chance.sample(self.replicas, self.chance.randint(1, 4)):
            self._hold(replica, keys[: self.chance.randint(BLOCKS // 4, BLOCKS)])

    def _hold(self, replica: int, keys: list[int]) -> None:
        depth = self.tree.match(keys).get(replica, 0)
        new = keys[depth:]
        began = time.process_time()
        self.tree.store(replica, keys[depth - 1] if depth else 0, new)
        self.store_s += time.process_time() - began
        self.stored += len(new)


class Decision:
    """All that happens between a prompt's ids and the choice of a replica, without the wire."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._board = Board()
        self._rows: dict[int, int] = {}
        for number in fleet.replicas:
            row = self._board.add(("group", number))
            row.set(_standing(fleet.chance))
            self._rows[number] = row.index
        self._policy = Price()
        self._chance = Random(2)

    def match(self, ids: bytes) -> object:
        """Hash, and ask who holds what."""
        return self._fleet.tree.match(keys_of(ids))

    def whole(self, ids: bytes) -> object:
        """Hash, ask who holds what or soon will, price at all replicas, choose."""
        held, soon = self._fleet.tree.reach(keys_of(ids))
        return self.price(held | soon if soon else held)

    def price(self, depths: dict[int, int]) -> object:
        """Price at all replicas, given how deep each matches, and choose."""
        matched = [0] * len(self._rows)
        for number, depth in depths.items():
            matched[self._rows[number]] = depth
        wish = Wish(prompt_tokens=IDS, max_tokens=128, session="")
        prices = self._board.price(matched, wish)
        return self._policy.choose(prices, self._board.eligible_rows(), wish, self._chance)


def _standing(chance: Random) -> Standing:
    return Standing(
        block_tokens=BLOCK_TOKENS,
        running=chance.randint(0, 60),
        waiting=chance.randint(0, 4),
        uncached_tokens=chance.randint(0, 8000),
        free_blocks=chance.randint(1000, 9000),
        cached_blocks=8000,
        kv_blocks=10_000,
        max_running=64,
        prefill_rate=chance.uniform(8000, 9000),
        decode_step_s=0.02,
    )


def micros(call: Callable[..., object], asked: Sequence[Any], rounds: int) -> list[float]:
    """Return the microseconds of so many calls, on one thing that is asked for after another."""
    times = []
    for number in range(rounds):
        one = asked[number % len(asked)]
        began = time.perf_counter()
        call(one)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def decisions(blocks: int, replicas: int, rounds: int) -> Row:
    """Print the first table; return its medians."""
    fleet = Fleet(blocks, replicas)
    decision, tree, found = Decision(fleet), fleet.tree, Row()
    print(f"\na decision among {replicas} replicas, {len(tree):,} blocks, us, median (least)")
    print(f"{'':32}{'own prompts':>16}{'system prompts':>18}")
    kinds = {
        "own": _Asked(tree, fleet.own),
        "system": _Asked(tree, fleet.shared),
    }
    for name, call, of in (
        ("hash", keys_of, "ids"),
        ("match", tree.match, "keys"),
        ("hash and match", decision.match, "ids"),
        ("price and choose", decision.price, "depths"),
        ("whole decision", decision.whole, "ids"),
        (f"reach, {BOOKED} bookings in flight", tree.reach, "keys"),
        ("whole decision then", decision.whole, "ids"),
        ("whole decision, prompt booked", decision.whole, "booked"),
    ):
        if name.startswith("reach"):
            _book(fleet)
        cells = []
        for kind, asked in kinds.items():
            times = micros(call, getattr(asked, of), rounds)
            found[f"{name}, {kind}, us"] = statistics.median(times)
            cells.append(f"{statistics.median(times):8.1f} ({min(times):.1f})")
        print(f"  {name:30}{cells[0]:>16}{cells[1]:>18}")
    return found


class _Asked:
    """Prompts of one kind, as each part of a decision wants them."""

    def __init__(self, tree: MetaTree, prompts: list[bytes]) -> None:
        self.ids = prompts
        self.booked = prompts[:BOOKED]
        self.keys = [keys_of(ids) for ids in prompts]
        self.depths = [tree.match(keys) for keys in self.keys]


def _book(fleet: Fleet) -> None:
    for prompts in (fleet.own, fleet.shared):
        for ids in prompts[:BOOKED]:
            fleet.tree.mark(fleet.chance.choice(fleet.replicas), keys_of(ids))


def chains(blocks: int, run: int, chance: Random) -> Iterator[list[int]]:
    """Make so many blocks in unrelated chains of `run`."""
    for _ in range(blocks // run):
        yield [chance.getrandbits(64) | 1 for _ in range(run)]


def changes(blocks: int, replicas: int) -> Row:
    """Print the second table; return its figures."""
    found = Row()
    print("\nchanges, million blocks a second        stored     removed")
    for run in RUNS:
        name = f"runs of {run}"
        stored, removed = _rates(blocks, replicas, run)
        found |= {f"{name}, stored": stored, f"{name}, removed": removed}
        print(f"  {name:36}{stored:9.2f}{removed:12.2f}")
    stored, removed = _rates(blocks, replicas, BLOCKS, at_once=1)
    found |= {"one by one, stored": stored, "one by one, removed": removed}
    print(f"  {f'runs of {BLOCKS}, a block at a time':36}{stored:9.2f}{removed:12.2f}")
    return found | _purge(blocks, replicas)


def _rates(blocks: int, replicas: int, run: int, at_once: int = 0) -> tuple[float, float]:
    """Store chains in an index that grows to `blocks`, then remove a part of them."""
    tree = MetaTree(budget_bytes=UNBOUNDED)
    numbers, at_once = [tree.join() for _ in range(replicas)], at_once or run
    kept, stored_s = [], 0.0
    for index, keys in enumerate(chains(blocks, run, Random(run))):
        parts = [keys[start : start + at_once] for start in range(0, run, at_once)]
        number, parent = numbers[index % replicas], 0
        began = time.process_time()
        for part in parts:
            tree.store(number, parent, part)
            parent = part[-1]
        stored_s += time.process_time() - began
        if index % 4 == 0:
            kept.append((number, [part[::-1] for part in reversed(parts)]))
    began = time.process_time()
    for number, parts in kept:
        for part in parts:
            tree.remove(number, part)
    removed_s = time.process_time() - began
    return blocks / stored_s / 1e6, len(kept) * run / removed_s / 1e6


def _purge(blocks: int, replicas: int) -> Row:
    fleet = Fleet(blocks, replicas)
    tree, gone = fleet.tree, fleet.replicas[0]
    held = len(tree.keys_of(gone))
    began = time.process_time()
    tree.leave(gone)
    left_us = (time.process_time() - began) * 1e6
    began = time.process_time()
    while not tree.sweep(1000):
        pass
    swept_ms = (time.process_time() - began) * 1e3
    print(f"  a replica of {held:,} blocks leaves: {left_us:.0f} us; swept in {swept_ms:.1f} ms")
    return {"leave, us": left_us, "sweep, ms": swept_ms}


def memory(blocks: int, replicas: int) -> Row:
    """Print the third table; return its figures."""
    found = Row()
    print("\nbytes a block                  measured     as its budget counts")
    for run in RUNS:
        measured, counted = alone(partial(_bytes, blocks, replicas, run))
        found[f"runs of {run}, bytes a block"] = measured
        print(f"  runs of {run:<20}{measured:9.0f}{counted:18.0f}")
    measured, counted = alone(partial(_bytes_at_budget, blocks, replicas))
    found["runs of 8 at the budget, bytes a block"] = measured
    print(f"  {'runs of 8, at its budget':28}{measured:9.0f}{counted:18.0f}")
    return found


def _bytes_at_budget(blocks: int, replicas: int) -> tuple[float, float]:
    """Store three times what the budget is for, so that blocks go as others come."""
    chance, run = Random(8), 8
    before = _resident()
    tree = MetaTree(budget_bytes=blocks * (BYTES_PER_KEY + BYTES_PER_RUN // run))
    numbers = [tree.join() for _ in range(replicas)]
    for index, keys in enumerate(chains(3 * blocks, run, chance)):
        tree.store(numbers[index % replicas], 0, keys)
    del keys
    return (_resident() - before) / len(tree), tree.cost_bytes / len(tree)


def _bytes(blocks: int, replicas: int, run: int) -> tuple[float, float]:
    chance = Random(run)
    before = _resident()
    tree = MetaTree(budget_bytes=UNBOUNDED)
    numbers = [tree.join() for _ in range(replicas)]
    for index, keys in enumerate(chains(blocks, run, chance)):
        tree.store(numbers[index % replicas], 0, keys)
    del keys
    return (_resident() - before) / len(tree), tree.cost_bytes / len(tree)


def growth(rounds: int) -> Row:
    """Print the fourth table; return its figures."""
    found = Row()
    print("\nreplicas      blocks   hash and match, us   store, M/s   bytes a block        MiB")
    for replicas, blocks in GROWTH:
        row = alone(partial(_grown, blocks, replicas, rounds))
        found |= {f"{replicas} replicas, {blocks} blocks, {key}": row[key] for key in row}
        print(
            f"{replicas:8}{blocks:12,}{row['match_us']:21.1f}{row['stored']:13.2f}"
            f"{row['bytes']:16.0f}{row['mib']:11.0f}"
        )
    return found


def _grown(blocks: int, replicas: int, rounds: int) -> Row:
    before = _resident()
    fleet = Fleet(blocks, replicas)
    used = _resident() - before - sum(map(len, fleet.own + fleet.shared))
    times = micros(Decision(fleet).match, fleet.own + fleet.shared, rounds)
    return {
        "match_us": statistics.median(times),
        "stored": fleet.stored / fleet.store_s / 1e6,
        "bytes": used / len(fleet.tree),
        "mib": used / MIB,
    }


def _resident() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def alone(call: Callable[[], T]) -> T:
    """Return what a call gives in a process of its own, whose memory nobody else has used."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--no-growth", action="store_true", help="leave out the fourth table")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    found = decisions(options.blocks, options.replicas, options.rounds)
    found |= changes(options.blocks, options.replicas)
    found |= memory(options.blocks, options.replicas)
    if not options.no_growth:
        found |= growth(options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
