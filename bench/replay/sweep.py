"""What is each constant of the price worth? One changed at a time, on the trace and all workloads.

    python -m bench.replay.sweep --trace PATH [--loads 0.55,0.75,0.9] [--seeds 1] [--json OUT]

Prints the mean time to first token over that of the shipped constants, so 1 means that a change
would not matter there. A constant that was fitted to one trace would be better off elsewhere
with another value.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.replay.batch import Task, run_all
from bench.replay.simulate import Setup
from bench.replay.workloads import WORKLOADS
from router.policy.price import SHAPE, Shape

VARIANTS: dict[str, Shape] = {
    "shipped": SHAPE,
    "alpha 1": replace(SHAPE, idle=1.0, full=1.0, lane=0.0),
    "alpha 8": replace(SHAPE, idle=8.0, full=8.0, lane=0.0),
    "idle 1.5": replace(SHAPE, idle=1.5),
    "idle 3": replace(SHAPE, idle=3.0),
    "full 16": replace(SHAPE, full=16.0),
    "full 256": replace(SHAPE, full=256.0),
    "power 1": replace(SHAPE, power=1.0),
    "power 2": replace(SHAPE, power=2.0),
    "lane 0": replace(SHAPE, lane=0.0),
    "lane 20": replace(SHAPE, lane=20.0),
    "lane 80": replace(SHAPE, lane=80.0),
    "long 0.2": replace(SHAPE, long=0.2),
    "long 0.7": replace(SHAPE, long=0.7),
    "reuse 0": replace(SHAPE, reuse=0.0),
    "reuse 0.5": replace(SHAPE, reuse=0.5),
}


def places(trace: Path | None, loads: list[float], seeds: int) -> list[tuple[str, Task]]:
    """Return what is replayed under each variant, with its name."""
    found = []
    if trace is not None:
        found = [
            (f"trace {load}", Task(source=trace, policy="price", setup=Setup(load=load)))
            for load in loads
        ]
    return found + [
        (name, Task(source=name, policy="price", setup=Setup(seed=seed)))
        for name in WORKLOADS
        for seed in range(1, seeds + 1)
    ]


def main() -> int:
    """Run all variants everywhere and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--loads", default="0.55,0.75,0.9")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    try:
        loads = [float(each) for each in options.loads.split(",")]
        where = places(options.trace, loads, options.seeds)
        tasks = [replace(task, shape=shape) for shape in VARIANTS.values() for _, task in where]
        labels = [(variant, name) for variant in VARIANTS for name, _ in where]
        for label, row in zip(labels, run_all(tasks), strict=True):
            means[label].append(float(str(row["ttft_mean_s"])))
    except ValueError as error:  # ReplayError is one
        print(f"bench.replay: {error}", file=sys.stderr)
        return 2
    table = {
        name: {
            variant: round(median(means[variant, name]) / median(means["shipped", name]), 3)
            for variant in VARIANTS
        }
        for name in dict.fromkeys(name for name, _ in where)
    }
    print(f"{'':18}" + "".join(f"{variant:>10}" for variant in VARIANTS))
    for name, found in table.items():
        print(f"{name:18}" + "".join(f"{value:10.3f}" for value in found.values()))
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
