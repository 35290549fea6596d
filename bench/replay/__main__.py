"""Which policy serves a trace or a workload best? Replays it on a virtual clock.

    python -m bench.replay --trace PATH --replicas 8 --load 0.75 --routers 1 --policies all
    python -m bench.replay --workload chat --seed 3 --json OUT --plot OUT.png

Load is the share of the fleet's prefill capacity that the requests need with an endless cache
that all share; arrivals stay as they are and the replicas' pace follows from it. Exits with 2
on what can't be replayed.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.replay.batch import HEAD, Row, Task, line, names_of, run_all
from bench.replay.job import ReplayError
from bench.replay.plot import draw
from bench.replay.rivals import NAMES
from bench.replay.router import Links
from bench.replay.simulate import Setup
from bench.replay.workloads import WORKLOADS


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m bench.replay", description=(__doc__ or "").partition("\n")[0]
    )
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="PATH", help="in Mooncake's format")
    source.add_argument("--workload", metavar="NAME", help=f"all, or of {', '.join(WORKLOADS)}")
    made.add_argument("--policies", default="all", help=f"all, or of {', '.join(NAMES)}")
    made.add_argument("--replicas", type=int, default=0, help="default: the scenario's, 8")
    made.add_argument("--load", default="", help="one or several, with commas")
    made.add_argument("--routers", type=int, default=1)
    made.add_argument("--cache-tokens", type=int, default=0, help="ids of a replica's cache")
    made.add_argument("--limit", type=int, default=0, help="first requests of a trace only")
    made.add_argument("--spread", action="store_true", help="part requests of one timestamp")
    made.add_argument("--budget", type=int, default=512, help="ids of a step")
    made.add_argument("--model", choices=("full", "prefill"), default="full")
    made.add_argument("--feed-delay", type=float, default=0.005, metavar="S")
    made.add_argument("--feed-loss", type=float, default=0.0, metavar="CHANCE")
    made.add_argument("--no-repair", action="store_true", help="pass over gaps of the feed")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--processes", type=int, default=0, help="default: one for each core")
    made.add_argument("--json", type=Path, metavar="OUT")
    made.add_argument("--plot", type=Path, metavar="OUT.png")
    return made


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Return the runs that are asked for.

    Raises:
        ReplayError: A name or a number makes no sense.
    """
    links = Links(
        feed_delay_s=options.feed_delay,
        feed_loss=options.feed_loss,
        repair=not options.no_repair,
    )
    if links.feed_delay_s < 0 or not 0 <= links.feed_loss < 1:
        raise ReplayError("a delay is at least 0, and a chance of loss at least 0 and below 1")
    try:
        loads = [float(each) for each in options.load.split(",") if each] or [0.0]
    except ValueError as error:
        raise ReplayError(f"no load: {options.load!r}") from error
    if options.load and min(loads) <= 0:
        raise ReplayError("a load is above 0")
    sources: list[Path | str] = (
        [options.trace] if options.trace else [*names_of(options.workload, WORKLOADS)]
    )
    setup = {
        "replicas": options.replicas,
        "routers": options.routers,
        "cache_tokens": options.cache_tokens,
        "serial": options.model == "prefill",
        "budget": options.budget,
        "links": links,
        "seed": options.seed,
    }
    return [
        Task(
            source=source,
            policy=policy,
            limit=options.limit,
            spread=options.spread,
            setup=Setup(load=load, **setup),
        )
        for source in sources
        for load in loads
        for policy in names_of(options.policies, NAMES)
    ]


def main() -> int:
    """Replay, print a row as each run ends, and write what is asked for."""
    options = parser().parse_args()
    rows: list[Row] = []
    try:
        print(HEAD)
        for row in run_all(tasks_of(options), processes=options.processes):
            rows.append(row)
            print(line(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        if options.plot:
            draw(rows, options.plot)
    except (ReplayError, OSError) as error:
        print(f"bench.replay: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
