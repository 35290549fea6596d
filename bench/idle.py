"""What does an idle mesh cost? One command.

    python -m bench.idle [--seconds 20] [--groups 2] [--engine fake] [--json OUT]

Starts a real mesh, lets it serve one request, and prints the CPU that each process
then uses while nothing is asked, in percent of one core.
"""

import argparse
import asyncio
import json
from pathlib import Path

from bench.cpu import by_role, difference, running, seconds

# What starting leaves to do is done by then.
SETTLE_S = 3.0


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return percent of one core by role."""
    async with running(options.model, options.engine, f"--groups={options.groups}") as mesh:
        roles = by_role(mesh)
        await asyncio.sleep(SETTLE_S)
        before = seconds(roles)
        await asyncio.sleep(options.seconds)
        used = difference(seconds(roles), before)
    return {role: 100 * spent / options.seconds for role, spent in used.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--engine", choices=("fake", "torch"), default="fake")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    percent = asyncio.run(measure(options))
    print(f"{options.groups} groups, idle for {options.seconds:g} s, percent of one core")
    for role, value in {**percent, "all": sum(percent.values())}.items():
        print(f"{role:14}{value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(percent, indent=2) + "\n")


if __name__ == "__main__":
    main()
