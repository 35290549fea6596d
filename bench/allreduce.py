"""What does it cost to add up the parts of tensor-parallel ranks? One command.

    python -m bench.allreduce [--tp 2] [--calls 300] [--turns 3] [--no-spin] [--json OUT]

Starts `tp` ranks on this host that sum [rows, 576] again and again, in turns through
shared memory and through gloo, and prints how long rank 0's calls take. `begins` is
gloo's first call of a plan, which compares the ranks' digests.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from worker.config import RankConfig
from worker.parallel.group import TensorGroup
from worker.parallel.join import join
from worker.parallel.segment import make_segment
from worker.parallel.world import leave

ROWS = (1, 16, 512)
WIDTH = 576
DTYPES = (torch.bfloat16, torch.float32)
WARM_UP = 30


def main() -> None:
    """Start the ranks, and print a table of what rank 0 says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-spin", action="store_true", help="sleep at once, as on few cores")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(msgspec.json.decode(options.rank, type=RankConfig), options.calls, options.turns)
        return
    figures = run(options)
    print(f"tp={options.tp}, {options.calls} calls in {options.turns} turns, microseconds")
    print(f"{'':22}{'shm p50':>9}{'p99':>8}{'gloo p50':>10}{'p99':>8}{'begins':>9}{'gloo/shm':>10}")
    for name, ways in figures.items():
        shm, gloo, begins = ways["shm"], ways["gloo"], ways["begins"]
        print(
            f"{name:22}{shm['p50']:9.1f}{shm['p99']:8.0f}{gloo['p50']:10.1f}{gloo['p99']:8.0f}"
            f"{begins['p50']:9.1f}{gloo['p50'] / shm['p50']:10.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def run(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Return microseconds by tensor, way and percentile."""
    memory = make_segment(options.tp)
    spin = not options.no_spin and (os.cpu_count() or 1) >= options.tp
    command = [sys.executable, "-m", "bench.allreduce"]
    command += ["--calls", str(options.calls), "--turns", str(options.turns), "--rank"]
    with socket.create_server(("127.0.0.1", 0), backlog=options.tp) as listener:
        common = RankConfig(
            model_dir="", tp=options.tp, tensor_fd=memory, store_port=listener.getsockname()[1]
        )
        ranks = []
        for rank in range(options.tp):
            store_fd = listener.fileno() if rank == 0 else -1
            config = msgspec.structs.replace(common, tp_rank=rank, store_fd=store_fd, spin=spin)
            ranks.append(
                subprocess.Popen(
                    [*command, msgspec.json.encode(config).decode()],
                    pass_fds=[memory, listener.fileno()],
                    stdout=subprocess.PIPE,
                )
            )
    words = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; what it said stands above")
    return msgspec.json.decode(words[0], type=dict[str, dict[str, dict[str, float]]])


def measure(config: RankConfig, calls: int, turns: int) -> None:
    """Be one rank: sum in turns by both ways, and say how long it took."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    over_gloo = msgspec.structs.replace(config, tensors="gloo")
    groups = [join(way, torch.float32, device).group for way in (config, over_gloo)]
    figures = compared(groups[0], groups[1], calls, turns)
    sys.stdout.write(json.dumps(figures))
    sys.stdout.flush()
    for group in groups:
        group.close()
    leave()


def compared(
    shm: TensorGroup, gloo: TensorGroup, calls: int, turns: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return microseconds by tensor, way and percentile, measured in turns."""
    figures = {}
    for dtype in DTYPES:
        for rows in ROWS:
            tensor = torch.zeros(rows, WIDTH, dtype=dtype)
            ways: dict[str, Callable[[], object]] = {
                "shm": partial(shm.all_reduce, tensor),
                "gloo": partial(gloo.all_reduce, tensor),
                "begins": partial(first, gloo, tensor),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(turns):
                for way, call in ways.items():
                    times[way] += timed(call, calls)
            name = f"[{rows}, {WIDTH}] {str(dtype).removeprefix('torch.')}"
            figures[name] = {way: percentiles(found) for way, found in times.items()}
    return figures


def first(group: TensorGroup, tensor: torch.Tensor) -> None:
    """Make the first call of a plan."""
    group.begin(1)
    group.all_reduce(tensor)


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Return the microseconds of each call."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def percentiles(times: list[float]) -> dict[str, float]:
    """Return the middle, and what one in a hundred exceeds."""
    times.sort()
    return {"p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100]}


if __name__ == "__main__":
    main()
