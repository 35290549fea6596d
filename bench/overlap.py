"""Does planning a step while the one before it is computed help here? Off and on, in turns.

    python -m bench.overlap [--model smollm2] [--tp 1] [--turns 2]

Milliseconds a step of outputs that are drawn together, median (least), and on / off of
the medians. Below 1 overlap helps. On a CPU it shares the cores with the model.
"""

import argparse
import statistics
import time

from worker import Engine, SamplingParams

TOKENS = 32
TOGETHER = (1, 16)


def measure(overlap: str, options: argparse.Namespace) -> dict[int, list[float]]:
    """Return the milliseconds a step, by how many outputs are drawn together."""
    found = {}
    with Engine(options.model, tp=options.tp, kv_tokens=16384, overlap=overlap) as engine:
        params = SamplingParams(temperature=0.7, max_tokens=TOKENS, ignore_eos=True, seed=1)
        for count in TOGETHER:
            prompts = [[100 + number] * 20 + [number + 5] for number in range(count)]
            engine.generate(prompts, params)
            times = []
            for _ in range(4):
                began = time.perf_counter()
                engine.generate(prompts, params)
                times.append((time.perf_counter() - began) / TOKENS * 1e3)
            found[count] = times
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.turns):
        for overlap in ("off", "on"):
            for count, found in measure(overlap, options).items():
                times.setdefault((overlap, count), []).extend(found)
    for count in TOGETHER:
        off, on = times["off", count], times["on", count]
        ratio = statistics.median(on) / statistics.median(off)
        shown = [f"{statistics.median(each):.1f} ({min(each):.1f})" for each in (off, on)]
        print(f"{count:3} together: off {shown[0]}, on {shown[1]} ms a step; on / off {ratio:.2f}")


if __name__ == "__main__":
    main()
