"""Traces in Mooncake's format, good and bad, and the command that replays them."""

import json
from pathlib import Path

import pytest

from bench.replay.__main__ import main
from bench.replay.job import ReplayError, ceiling_tokens, prefill_rate
from bench.replay.trace import read

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 300, "output_length": 9, "hash_ids": [7]},
]


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    scenario = read(written(tmp_path / "t.jsonl", *LINES))
    assert [job.at for job in scenario.jobs] == [0.0, 1.0, 2.5]
    assert [list(job.keys) for job in scenario.jobs] == [[1, 2], [], [1, 2]]
    assert [job.output for job in scenario.jobs] == [3, 9, 1]
    assert scenario.jobs[0].session == scenario.jobs[2].session == "[0, 1]"


def test_requests_of_one_timestamp_can_be_spread(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", LINES[0], LINES[0], LINES[1])
    assert [job.at for job in read(path).jobs] == [0, 0, 2.5]
    assert [job.at for job in read(path, spread=True).jobs] == [0, 1.25, 2.5]


def test_the_load_is_the_share_of_capacity_that_an_endless_cache_leaves(tmp_path: Path) -> None:
    scenario = read(written(tmp_path / "t.jsonl", *LINES))
    assert ceiling_tokens(scenario) == 512  # one id at least is computed, so not both blocks
    needed = 1100 + 300 + 1024 - 512
    assert prefill_rate(scenario, load=0.5, replicas=4) == pytest.approx(needed / (0.5 * 4 * 2.5))


@pytest.mark.parametrize(
    "change", [{"input_length": 0}, {"output_length": -1}, {"hash_ids": [-3]}, {"hash_ids": "x"}]
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = written(tmp_path / "t.jsonl", LINES[0], {**LINES[1], **change})
    with pytest.raises(ReplayError, match="line 2 of the trace"):
        read(path)


def test_no_trace_at_all_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="can't be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ReplayError, match="no requests"):
        read(written(tmp_path / "empty.jsonl"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench.replay", *arguments, "--processes", "1"])
    return main()


def test_the_command_writes_rows_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "t.jsonl", *LINES)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--replicas", "2", "--routers", "2"]
    runs = ["--load", "0.5,0.9", "--policies", "price,sglang"]
    files = ["--json", str(out), "--plot", str(plot)]
    assert run(monkeypatch, "--trace", str(trace), *options, *runs, *files) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["policy"], row["load"]) for row in rows] == [
        ("price", 0.5),
        ("sglang", 0.5),
        ("price", 0.9),
        ("sglang", 0.9),
    ]
    figures = {"hit", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "imbalance"}
    assert all(figures <= row.keys() for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "price" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "nonsense"],
        ["--workload", "chat", "--policies", "nonsense"],
        ["--workload", "chat", "--load", "much"],
        ["--workload", "chat", "--load", "-1"],
        ["--workload", "chat", "--feed-loss", "1"],
        ["--trace", "nowhere.jsonl"],
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.startswith("bench.replay: ")
