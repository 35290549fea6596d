"""What does each process of the mesh cost, per streamed token and per request? One command.

    python -m bench.mesh [--streams 64 256] [--intervals-ms 0 30] [--tokens 200]
                         [--decode-ms 20] [--groups 1] [--repeat 3] [--json OUT]

Starts a real mesh of separate processes on the fake engine for each interval
(`--stream-interval-ms`), and drives it from a client process of its own: first with
many requests of one token, then with long streams. A request's figure is the CPU
time, user and system, of a one-token request; a token's is that of the long streams
less their requests, by their tokens. Both are medians of the repeats. CPU time is
fairly steady on a busy machine, rates and times to first tokens are not.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.cpu import ROLES, by_role, difference, running, seconds
from radixmesh.cli.mesh import Mesh

# Requests of one token that each client of the first part sends.
SHORT_ROUNDS = 8
SHORT_STREAMS = 32


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One line of results: one repeat, or the median of all."""

    streams: int
    interval_ms: float
    token_us: dict[str, float]
    request_us: dict[str, float]
    tokens_per_s: float
    messages_per_token: float
    first_token_ms: dict[str, float]


async def drive(mesh: Mesh, *, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Run the clients in a process of their own; return what they got and what it cost."""
    roles = by_role(mesh)
    before = seconds(roles)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.streams", mesh.address("grpc")),
        *(f"--streams={streams}", f"--tokens={tokens}", f"--rounds={rounds}"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise SystemExit("the clients failed")
    told: dict[str, Any] = json.loads(printed)
    return {**told, "cpu_s": difference(seconds(roles), before)}


async def measure(mesh: Mesh, streams: int, options: argparse.Namespace) -> Figures:
    """Measure once."""
    short = await drive(mesh, streams=SHORT_STREAMS, tokens=1, rounds=SHORT_ROUNDS)
    long = await drive(mesh, streams=streams, tokens=options.tokens, rounds=1)
    request_s = {role: short["cpu_s"][role] / short["requests"] for role in ROLES}
    more = long["tokens"] - long["requests"]
    waits = long["first_token_s"]
    return Figures(
        streams=streams,
        interval_ms=float(mesh.settings.stream_interval_ms or 0),
        token_us={
            role: 1e6 * (long["cpu_s"][role] - long["requests"] * request_s[role]) / more
            for role in ROLES
        },
        request_us={role: 1e6 * request_s[role] for role in ROLES},
        tokens_per_s=long["tokens"] / long["seconds"],
        messages_per_token=long["messages"] / long["tokens"],
        first_token_ms={f"p{part}": 1e3 * percentile(waits, part) for part in (50, 90, 99)},
    )


def percentile(ordered: Sequence[float], part: int) -> float:
    """Return a percentile of ordered values."""
    return ordered[min(len(ordered) - 1, len(ordered) * part // 100)]


def median(many: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""

    def middle(name: str) -> Any:
        values = [getattr(one, name) for one in many]
        if not isinstance(values[0], dict):
            return statistics.median(values)
        return {key: statistics.median(one[key] for one in values) for key in values[0]}

    return Figures(**{name: middle(name) for name in Figures.__dataclass_fields__})


def show(figures: Figures) -> None:
    """Print one result."""
    waits = ", ".join(f"{name} {value:.0f}" for name, value in figures.first_token_ms.items())
    print(
        f"\n{figures.streams:.0f} streams, interval {figures.interval_ms:g} ms: "
        f"{figures.tokens_per_s:.0f} tokens/s, {figures.messages_per_token:.2f} messages a token, "
        f"first token {waits} ms"
    )
    print(f"{'CPU us':14}{'a token':>10}{'a request':>12}")
    for role in ROLES:
        print(f"{role:14}{figures.token_us[role]:10.1f}{figures.request_us[role]:12.0f}")
    total = sum(figures.token_us.values()), sum(figures.request_us.values())
    print(f"{'all':14}{total[0]:10.1f}{total[1]:12.0f}", flush=True)


async def run(options: argparse.Namespace) -> list[Figures]:
    """Measure everything; print as it comes."""
    found = []
    for interval_ms in options.intervals_ms:
        most = max(options.streams)
        flags = (
            f"--groups={options.groups}",
            f"--stream-interval-ms={interval_ms}",
            f"--max-running={most}",
            f"--fake-decode-ms={options.decode_ms}",
            # All streams have their blocks at once, also when one group gets all of them.
            f"--fake-kv-blocks={most * (options.tokens + 256) // 16}",
        )
        async with running(options.model, "fake", *flags) as mesh:
            await drive(mesh, streams=8, tokens=32, rounds=2)  # imports and caches
            for streams in options.streams:
                many = [await measure(mesh, streams, options) for _ in range(options.repeat)]
                found.append(median(many))
                show(found[-1])
    return found


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="only its tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--intervals-ms", type=float, nargs="+", default=[0.0, 30.0])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--decode-ms", type=float, default=20.0)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    if options.json:
        facts = {"cores": psutil.cpu_count(), "python": sys.version.split()[0]}
        results = [asdict(one) for one in found]
        options.json.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
