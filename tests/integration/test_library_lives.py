"""The library when things end: ranks, replicas, calls, engines and programs."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from radixmesh import errors
from radixmesh.settings import child_environment
from tests.fakes.library import fake_engine, kill, my_ranks
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.rank_processes import gone, ranks_of
from tests.fakes.worker_front import free_port
from worker import Engine, Output, SamplingParams

pytestmark = [pytest.mark.e2e]

SLOW: dict[str, Any] = {"fake_decode_ms": 10}


@pytest.fixture(scope="module")
def ordinary(model_dir: Path) -> list[int]:
    return ordinary_ids(model_dir)


# Replicas.


@pytest.mark.parametrize("place", ["dp=0 pp=0 tp=0", "dp=1 pp=0 tp=1"])
def test_a_batch_outlives_a_killed_rank_with_the_same_ids(
    model_dir: Path, ordinary: list[int], place: str
) -> None:
    prompts = [[at + 4] * 20 for at in range(24)]
    with fake_engine(model_dir, dp=2, tp=2, max_running=8, **SLOW) as engine:
        seen: list[Output] = []

        def after_the_first(output: Output) -> None:
            if not seen:
                kill(place)
            seen.append(output)

        sampling = [SamplingParams(max_tokens=20 + at, logprobs=True) for at in range(24)]
        outputs = engine.generate(prompts, sampling, on_output=after_the_first)
        for at, output in enumerate(outputs):
            assert output.ids == oracle_output(prompts[at], ordinary, 20 + at)
            assert len(output.logprobs) == 20 + at
        assert len(my_ranks()) == 4, "the replica came back"


def test_a_batch_waits_for_the_only_replica_to_come_back(
    model_dir: Path, ordinary: list[int]
) -> None:
    with fake_engine(model_dir, **SLOW) as engine:
        seen: list[int] = []

        def kill_twice(output: Output) -> None:
            seen.append(output.prompt)
            if len(seen) <= 2:
                kill("dp=0")

        sampling = [SamplingParams(max_tokens=10 * at + 10) for at in range(4)]
        outputs = engine.generate([[at + 4] for at in range(4)], sampling, on_output=kill_twice)
        for at, output in enumerate(outputs):
            assert output.ids == oracle_output([at + 4], ordinary, 10 * at + 10)
        assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["exit@prompt-contains=77", "raise@prompt-contains=77"])
def test_a_prompt_that_kills_its_replica_fails_alone(
    model_dir: Path, ordinary: list[int], fault: str
) -> None:
    with fake_engine(model_dir, dp=2, fake_faults=[fault]) as engine:
        prompts = [[77] if at == 5 else [at + 4, 9] for at in range(12)]
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        outputs = engine.generate(prompts, sampling, raise_errors=False)
        assert isinstance(outputs[5].error, errors.RequestPoisoned)
        for prompt, output in zip(prompts, outputs, strict=True):
            if prompt != [77]:
                assert output.error is None
                assert output.ids == oracle_output(prompt, ordinary, 8)


# Calls.


def test_a_call_that_fails_gives_up_the_rest_and_frees_it(model_dir: Path) -> None:
    with fake_engine(model_dir, max_running=2, max_waiting=1, **SLOW) as engine:
        first = [SamplingParams(max_tokens=1), *[SamplingParams(max_tokens=4000)] * 3]

        def refuse(output: Output) -> None:
            raise LookupError

        with pytest.raises(LookupError):
            engine.generate([[5]] * 4, first, on_output=refuse)
        # Two places and one to wait: were they still taken, this would take 40 s.
        assert len(engine.generate([[5], [6]], SamplingParams(max_tokens=2))) == 2


async def test_a_cancelled_call_gives_up_what_runs(model_dir: Path) -> None:
    with fake_engine(model_dir, max_running=2, max_waiting=1, **SLOW) as engine:
        long = SamplingParams(max_tokens=4000)
        call = asyncio.create_task(engine.generate_async([[5]] * 9, long))
        async for _ in engine.stream([6], SamplingParams(max_tokens=1)):
            pass
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        stream = engine.stream([5], long)
        await anext(stream)
        await stream.aclose()
        assert len(await engine.generate_async([[5], [6]], SamplingParams(max_tokens=2))) == 2


def test_a_stream_outlives_a_killed_rank(model_dir: Path, ordinary: list[int]) -> None:
    async def listen(engine: Engine) -> list[int]:
        ids: list[int] = []
        async for piece in engine.stream([5, 6], SamplingParams(max_tokens=40)):
            if not ids:
                kill("dp=0")
            ids += piece.ids
        return ids

    with fake_engine(model_dir, **SLOW) as engine:
        assert asyncio.run(listen(engine)) == oracle_output([5, 6], ordinary, 40)


def test_a_loop_that_ended_in_the_middle_of_a_stream_hurts_nobody(
    model_dir: Path, ordinary: list[int]
) -> None:
    async def leave(engine: Engine) -> None:
        stream = engine.stream([5], SamplingParams(max_tokens=100))
        await anext(stream)

    with fake_engine(model_dir, **SLOW) as engine:
        asyncio.run(leave(engine))
        [output] = engine.generate([[6]], SamplingParams(max_tokens=20))
        assert output.ids == oracle_output([6], ordinary, 20)


# Engines.


def test_closing_ends_calls_with_a_type_and_leaves_no_rank(model_dir: Path) -> None:
    failures: list[BaseException] = []
    with fake_engine(model_dir, dp=2, tp=2, **SLOW) as engine:
        ranks = my_ranks()
        assert len(ranks) == 4

        def ask() -> None:
            try:
                engine.generate([[5]] * 200, SamplingParams(max_tokens=4000))
            except errors.MeshError as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        engine.generate([[9]], SamplingParams(max_tokens=3), priority=1)
        engine.close()
        assert not any(rank.is_running() for rank in ranks)
        thread.join()
        engine.close()
    assert [type(failure) for failure in failures] == [errors.Draining]
    for use in (lambda: engine.generate([[5]]), engine.flush_cache):
        with pytest.raises(errors.Draining, match="closed"):
            use()
    assert repr(engine).endswith("closed>")


def test_an_engine_that_is_forgotten_takes_its_ranks_along(model_dir: Path) -> None:
    engine = Engine(model_dir, engine="fake")
    [rank] = my_ranks()
    del engine
    assert not rank.is_running()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp": 0}, "dp: "),
        ({"max_runing": 3}, "max_runing: "),
        ({"port": 3}, "port: an engine has no such setting"),
        ({"tp": 3, "nnodes": 2, "rendezvous": "a:1"}, "--nnodes: "),
        ({"fake_faults": ["sleep@step=1"]}, "--fake-faults: "),
    ],
)
def test_what_an_engine_can_t_be_is_said_by_name_and_leaves_no_rank(
    model_dir: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        Engine(model_dir, engine="fake", **fields)
    assert refused.value.message.startswith(said)
    assert my_ranks() == []


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="no model at"):
        Engine(tmp_path / "nothing")


def test_ranks_that_are_never_ready_are_said_in_time(model_dir: Path) -> None:
    with pytest.raises(errors.NoReplicaReady, match=r"not ready in 0\.7 s: .* replicas 0$"):
        Engine(model_dir, engine="fake", fake_faults=["hang@step=0"], startup_timeout_s=0.7)
    assert my_ranks() == []


def test_a_start_that_waits_for_hosts_says_for_which(model_dir: Path) -> None:
    meeting = f"127.0.0.1:{free_port()}"
    shape: dict[str, Any] = {"tp": 2, "nnodes": 2, "rendezvous": meeting, "startup_timeout_s": 0.7}
    with pytest.raises(errors.NoReplicaReady, match=r"waiting for nodes 1$"):
        Engine(model_dir, engine="fake", **shape)


# Programs. Each prints the process ids of its ranks, then does what is written here.

SCRIPT = """
import os, sys
from worker import Engine, SamplingParams

engine = Engine(sys.argv[1], engine="fake", dp=2)
output = engine.generate([[5]], SamplingParams(max_tokens=3))[0]
print(*output.ids, flush=True)
"""

THREADED = """
import threading
from radixmesh.errors import Draining
def ask():
    try:
        engine.generate([[5]] * 99, SamplingParams(max_tokens=4000))
    except Draining:
        pass
threading.Thread(target=ask, daemon=True).start()
engine.generate([[6]])
"""


def start(model_dir: Path, rest: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT + rest, str(model_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )


@pytest.mark.parametrize(
    ("rest", "status", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine\n"),
        ("engine.close(); engine.close()", 0, ""),
        ("with engine: pass", 0, ""),
        # A copy of the process owns nothing of the engine.
        ("\nif not os.fork(): sys.exit()\nos.wait(); engine.generate([[5]])", 0, ""),
        # A batch that still runs in another thread ends with its program.
        (
            THREADED,
            0,
            "",
        ),
    ],
)
def test_a_plain_script_needs_no_guard_and_no_close(
    model_dir: Path, ordinary: list[int], rest: str, status: int, error: str
) -> None:
    with start(model_dir, rest) as script:
        assert script.stdout is not None
        ids = [int(each) for each in script.stdout.readline().split()]
        ranks = ranks_of(script.pid)
        _, said = script.communicate(timeout=15)
    assert ids == oracle_output([5], ordinary, 3)
    assert (script.returncode, said.endswith(error)) == (status, True), said
    assert error or not said
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_ranks_die_with_a_killed_program(model_dir: Path, number: signal.Signals) -> None:
    with start(model_dir, "sys.stdin.read()") as script:
        assert script.stdout is not None
        script.stdout.readline()
        ranks = ranks_of(script.pid)
        assert len(ranks) == 2
        script.send_signal(number)
        async with asyncio.timeout(3):
            await gone(ranks)
        script.communicate()
        assert script.returncode == -number


def test_ctrl_c_gives_up_a_batch_and_the_engine_goes_on(
    model_dir: Path, ordinary: list[int]
) -> None:
    # A shell that runs the tests in the background has its children ignore interrupts.
    rest = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    engine.generate([[5]] * 9, SamplingParams(max_tokens=4000), on_output=print)
except KeyboardInterrupt:
    print(*engine.generate([[6]], SamplingParams(max_tokens=3))[0].ids)
"""
    with start(model_dir, rest) as script:
        assert script.stdout is not None
        script.stdout.readline()
        process = psutil.Process(script.pid)
        while process.num_ctx_switches().voluntary and script.poll() is None:
            # Until it waits for its batch: its main thread sleeps in a lock.
            if process.status() == psutil.STATUS_SLEEPING:
                break
        script.send_signal(signal.SIGINT)
        out, said = script.communicate(timeout=15)
    assert (script.returncode, said) == (0, "")
    assert [int(each) for each in out.split()] == oracle_output([6], ordinary, 3)
