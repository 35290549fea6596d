"""The worker's flags: stated defaults, clear refusals."""

import os
import sys

import pytest

from radixmesh.settings import load
from worker.front.assembly import group_spec, rank_config
from worker.settings import WorkerSettings


def settings(*argv: str) -> WorkerSettings:
    return load(WorkerSettings, ["--model", "/models/tiny", *argv], prog="radixmesh-worker")


def test_the_defaults_are_those_that_are_stated() -> None:
    made = settings()
    assert made.engine == "torch"
    assert (made.dp, made.pp, made.tp) == (1, 1, 1)
    assert (made.max_running, made.max_waiting, made.max_batched_tokens) == (64, 1024, 512)
    assert made.kv_bytes == 1 << 30
    assert (made.kv_tokens, made.block_tokens, made.max_model_len) == (0, 0, 0)
    assert (made.step_timeout_s, made.drain_grace_s) == (60, 30)


def test_the_served_name_is_the_last_part_of_the_model() -> None:
    assert settings().served_name == "tiny"
    assert settings("--model-name", "poet").served_name == "poet"


def test_threads_are_the_usable_cores_divided_by_the_ranks() -> None:
    cores = len(os.sched_getaffinity(0))
    assert settings().rank_threads == cores
    assert settings("--dp", "1000").rank_threads == 1
    assert settings("--threads", "7").rank_threads == 7


def test_every_rank_is_told_what_the_flags_say() -> None:
    flags = [
        *("--engine", "fake", "--dp", "2", "--tp", "3", "--kv-tokens", "640", "--dtype", "float32"),
        *("--fake-eos-after", "5", "--fake-decode-ms", "1.5", "--fake-kv-blocks", "40"),
        *("--fake-prefill-tokens-per-s", "1000", "--fake-faults", "exit@step=9"),
        *("--fake-faults", "hang@step=3:tp=1", "--block-tokens", "8", "--log-level", "debug"),
    ]
    config = rank_config(settings(*flags), "/models/tiny")
    assert (config.engine, config.dp, config.pp, config.tp) == ("fake", 2, 1, 3)
    assert (config.kv_tokens, config.block_tokens, config.dtype) == (640, 8, "float32")
    fake = config.fake
    assert (fake.eos_after, fake.decode_ms, fake.kv_blocks) == (5, 1.5, 40)
    assert fake.prefill_tokens_per_s == 1000
    assert fake.faults == ("exit@step=9", "hang@step=3:tp=1")
    assert config.log_level == "DEBUG"


def test_the_group_is_described_by_the_flags() -> None:
    spec = group_spec(settings("--dp", "3", "--weight-version", "w2"), "f" * 64)
    assert (spec.model, spec.weight_version, spec.dp) == ("tiny", "w2", 3)
    assert spec.fingerprint == "f" * 64


@pytest.mark.parametrize(
    "argv",
    [
        ["--dp", "0"],
        ["--max-running", "0"],
        ["--engine", "magic"],
        ["--dtype", "int3"],
        ["--port", "70000"],
        ["--nnodes", "2", "--tp", "3"],
        ["--rendezvous", "", "--nnodes", "2", "--tp", "2"],
        ["--rendezvous", "here", "--nnodes", "2", "--tp", "2"],
        ["--rendezvous", "here:70000", "--nnodes", "2", "--tp", "2"],
        ["--carrier", "local", "--nnodes", "2", "--tp", "2", "--rendezvous", "h:1"],
        ["--tensors", "shm", "--nnodes", "2", "--tp", "2", "--rendezvous", "h:1"],
        ["--node-rank", "1"],
        ["--overlap", "on", "--pp", "2"],
    ],
)
def test_a_wrong_flag_is_refused_by_name(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        settings(*argv)
    assert left.value.code == 2
    assert argv[0].removeprefix("--") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "carrier", "tensors"),
    [
        ([], "local", "shm"),
        (["--engine", "fake"], "local", "gloo"),
        (["--carrier", "gloo", "--tensors", "gloo"], "gloo", "gloo"),
        (["--nnodes", "2", "--tp", "2", "--rendezvous", "h:1"], "gloo", "gloo"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_records_and_tensors_stay_on_a_host_that_has_all_ranks(
    argv: list[str], carrier: str, tensors: str
) -> None:
    config = rank_config(settings(*argv), "m")
    assert (config.carrier, config.tensors) == (carrier, tensors)


def test_ranks_spin_only_where_each_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert rank_config(settings("--dp", str(cores)), "m").spin
    assert not rank_config(settings("--dp", str(cores + 1)), "m").spin


def test_a_rendezvous_may_be_an_address_of_any_kind() -> None:
    common = ("--nnodes", "2", "--tp", "2", "--rendezvous")
    assert settings(*common, "10.0.0.1:29500").meeting_place == ("10.0.0.1", "29500")
    assert settings(*common, "[::1]:29500").meeting_place == ("::1", "29500")


@pytest.mark.parametrize("flag", ["--model", "--weight-version", "--host"])
def test_bytes_that_are_no_text_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        settings(flag, os.fsdecode(b"a\xff"))
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"radixmesh-worker: {flag}: Input should be text in UTF-8, got 'a\\udcff'"


@pytest.mark.parametrize(
    "flag", ["max-model-len", "max-running", "max-batched-tokens", "kv-tokens", "kv-bytes"]
)
def test_a_number_that_no_rank_can_be_told_is_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        settings(f"--{flag}", str(10**24))
    assert left.value.code == 2
    assert f"--{flag}: Input should be less than" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
@pytest.mark.parametrize("flag", ["step-timeout-s", "peer-timeout-s", "ageing-s", "fake-decode-ms"])
def test_a_time_that_no_timer_takes_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        settings(f"--{flag}", value)
    assert left.value.code == 2
    assert f"--{flag}: Input should be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [("--max-model-len", "1"), ("--kv-tokens", "1", "--block-tokens", "1")]
)
def test_room_for_less_than_a_prompt_and_an_output_is_refused(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        settings(*flags)
    assert left.value.code == 2
    assert f"{flags[0]}: a prompt and its output need 2" in capsys.readouterr().err
