"""What does a fleet of thousands of worker groups cost a router? One command.

    python -m bench.fleet [--groups 1000 2000 3000] [--json OUT]

Groups without links are listed, say hello with a snapshot, and are listed no more, as a source
of members would have it. Prints milliseconds of CPU for all of them and microseconds for one,
what a further frame and a tick cost while they are there, and what is alive while and after.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from router.discovery.member import Member
from router.discovery.reconcile import Reconciler
from router.discovery.targets import GroupTarget
from router.fleet.group import Group
from router.fleet.workload import Report
from tests.fakes.group_link import FakeFleet, FakeGroupLink

FRAMES = 2000
MIB = 1 << 20


def cpu_ms(work: Callable[[], object]) -> float:
    """Milliseconds of CPU that some work takes."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def alive() -> int:
    """How many objects the collector knows."""
    gc.collect()
    return len(gc.get_objects())


def measure(count: int) -> dict[str, float]:
    """Return the figures for so many groups."""
    fake = FakeFleet()
    reconciler: Reconciler[Group] = Reconciler(GroupTarget(fake.fleet, drain_s=0))
    members = [Member(key=f"u{n}@w{n}:1", address=f"w{n}:1", name=f"pod-{n}") for n in range(count)]
    before = alive()
    add = cpu_ms(lambda: reconciler.publish("all", members))
    links = [fake.links[f"w{n}"] for n in range(count)]
    hello = cpu_ms(lambda: _greet(links))
    again = cpu_ms(lambda: reconciler.publish("all", members))
    there = alive() - before
    frame = cpu_ms(lambda: _frames(links)) / FRAMES
    tick = cpu_ms(fake.fleet.tick)
    models = cpu_ms(fake.fleet.models)
    links.clear()
    remove = cpu_ms(lambda: reconciler.publish("all", []))
    fake.links.clear()
    sweep = cpu_ms(lambda: _sweep(fake))
    return {
        "add_ms": add,
        "hello_ms": hello,
        "same_list_ms": again,
        "remove_ms": remove + sweep,
        "add_us_each": 1000 * add / count,
        "hello_us_each": 1000 * hello / count,
        "remove_us_each": 1000 * (remove + sweep) / count,
        "frame_us": 1000 * frame,
        "tick_ms": tick,
        "models_ms": models,
        "objects_there": there,
        "objects_left": alive() - before,
        "rss_mib": psutil.Process().memory_info().rss / MIB,
    }


def _sweep(fake: FakeFleet) -> None:
    """Have the tree forget who has left."""
    for _ in range(3):
        fake.fleet.tick()


def _greet(links: list[FakeGroupLink]) -> None:
    """All come up, each as a process of its own that holds one block."""
    for number, link in enumerate(links):
        link.events.on_up(f"instance-{number}", is_new=True)
        link.up(incarnation=number + 1)
        link.holds(0, [number + 1], incarnation=number + 1)


def _frames(links: list[FakeGroupLink]) -> None:
    """Loads of groups, one frame each."""
    for number in range(FRAMES):
        at = number % len(links)
        links[at].events.on_report(0, at + 1, Report(running=number % 7, free_blocks=4096))
        links[at].events.on_frame_end()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 2000, 3000])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    measure(max(options.groups))  # what is kept to be used again is there afterwards
    rows = {count: measure(count) for count in options.groups}
    print(f"{'groups':16}" + "".join(f"{count:>12}" for count in rows))
    for name in next(iter(rows.values())):
        print(f"{name:16}" + "".join(f"{row[name]:12.2f}" for row in rows.values()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
