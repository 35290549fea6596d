"""`radixmesh up` with real processes and the fake engine: answers, kills, and a clean end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from radixmesh.client import AsyncClient, AsyncFleetClient, Message, Retry, Sampling
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.up import RunningUp, gone, running_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(150),
    pytest.mark.asyncio(loop_scope="module"),
]

STREAMS = 32
TOKENS = 48
GRPCURL = Path(sys.executable).parent / "grpcurl"


class Expected:
    """What the mesh must say, from the oracle and the tokenizer's own files."""

    def __init__(self, model_dir: Path) -> None:
        self._ordinary = ordinary_ids(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def ids(self, prompt: Sequence[int], count: int = TOKENS) -> tuple[int, ...]:
        return tuple(oracle_output(prompt, self._ordinary, count))

    def text(self, prompt: Sequence[int], count: int = TOKENS) -> str:
        return str(self._tokenizer.decode(list(self.ids(prompt, count))))

    def prompt(self, number: int, count: int = 40) -> list[int]:
        """A prompt of its own for every number."""
        return [self._ordinary[(number * 31 + place) % 500] for place in range(count)]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Expected:
    return Expected(model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[RunningUp, None]:
    folder = tmp_path_factory.mktemp("up")
    async with running_up(model_dir, folder, "--fake-decode-ms=20") as running:
        yield running


async def test_grpc_says_what_the_engine_generates(mesh: RunningUp, expected: Expected) -> None:
    prompt = expected.prompt(1)
    async with AsyncClient(mesh.grpc) as client:
        result = await client.complete(prompt, sampling=Sampling(max_tokens=TOKENS))
    assert result.outputs[0].token_ids == expected.ids(prompt)
    assert result.text == expected.text(prompt)


async def test_http_says_the_same(mesh: RunningUp, expected: Expected) -> None:
    prompt = expected.prompt(2)
    async with httpx.AsyncClient(base_url=mesh.http) as calls:
        response = await calls.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9})
    body = response.json()
    assert body["choices"][0]["text"] == expected.text(prompt, 9)
    assert (body["model"], body["usage"]["completion_tokens"]) == ("tiny", 9)


async def test_the_openai_client_streams_what_grpc_says(mesh: RunningUp) -> None:
    async with (
        AsyncClient(mesh.grpc) as client,
        openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="none") as official,
    ):
        said = await client.complete([Message("user", "hi")], sampling=Sampling(max_tokens=20))
        stream = await official.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=20,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said.text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_second_turn_reuses_the_blocks_of_the_first(mesh: RunningUp) -> None:
    first = [Message("user", "Tell me of the river, the bridge and the child who counts boats.")]
    async with AsyncClient(mesh.grpc) as client:
        said = await client.complete(first, sampling=Sampling(max_tokens=TOKENS))
        second = [*first, Message("assistant", said.text), Message("user", "And then?")]
        receipt = (await client.complete(second, sampling=Sampling(max_tokens=1))).receipt
    assert 0 < receipt.predicted_blocks == receipt.actual_blocks


async def test_grpcurl_lists_and_streams_by_reflection(mesh: RunningUp, expected: Expected) -> None:
    async def grpcurl(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(GRPCURL), "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()

    prompt = expected.prompt(3)
    request = {"tokenIds": {"ids": prompt}, "sampling": {"maxTokens": TOKENS}}
    listed = await grpcurl(mesh.grpc, "list")
    answer = await grpcurl(
        "-d", json.dumps(request), mesh.grpc, "radixmesh.router.v1.RouterService/Generate"
    )
    assert "radixmesh.router.v1.RouterService" in listed.split()
    messages = _json_values(answer)
    text = "".join(message.get("delta", {}).get("text", "") for message in messages)
    assert text == expected.text(prompt)
    assert len(messages) > 2


def _json_values(text: str) -> list[dict[str, dict[str, str]]]:
    decoder = json.JSONDecoder()
    values, place = [], 0
    while (place := text.find("{", place)) >= 0:
        value, place = decoder.raw_decode(text, place)
        values.append(value)
    return values


async def _streams_over_a_kill(mesh: RunningUp, expected: Expected, seed: int, pid: int) -> None:
    """Kill a process when all streams have begun; every stream must be whole, once."""
    begun = asyncio.Barrier(STREAMS + 1)
    prompts = [expected.prompt(seed * STREAMS + number) for number in range(STREAMS)]

    async def stream(client: AsyncClient, prompt: list[int]) -> tuple[str, tuple[int, ...]]:
        text = ""
        ids: tuple[int, ...] = ()
        async for chunk in client.generate(prompt, sampling=Sampling(max_tokens=TOKENS)):
            if not ids and chunk.token_ids:
                await begun.wait()
            text += chunk.text
            ids += chunk.token_ids
        return text, ids

    async with AsyncClient(mesh.grpc) as client, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(client, prompt)) for prompt in prompts]
        await begun.wait()
        os.kill(pid, signal.SIGKILL)
    for prompt, each in zip(prompts, streams, strict=True):
        assert each.result() == (expected.text(prompt), expected.ids(prompt))
    await mesh.until_whole()


@pytest.mark.parametrize("service", ["worker-0", "detokenizer", "tokenizer"])
async def test_streams_survive_the_death_of_a_service(
    mesh: RunningUp, expected: Expected, service: str
) -> None:
    killed = mesh.facts["pids"][service]
    seed = 10 + len(service)
    await _streams_over_a_kill(mesh, expected, seed, killed)
    async with AsyncClient(mesh.grpc) as client:
        await client.complete("text for the tokenizer", sampling=Sampling(max_tokens=1))
    assert mesh.facts["pids"][service] not in {killed, None}


async def test_prompts_survive_the_death_of_the_tokenizer_that_had_them(mesh: RunningUp) -> None:
    prompts = [f"Number {number} is a prompt of its own." for number in range(STREAMS)]
    sampling = Sampling(max_tokens=4)
    async with AsyncClient(mesh.grpc) as client:
        calm = [(await client.complete(prompt, sampling=sampling)).text for prompt in prompts]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(client.complete(prompt, sampling=sampling)) for prompt in prompts
            ]
            os.kill(mesh.facts["pids"]["tokenizer"], signal.SIGKILL)
    assert [each.result().text for each in asked] == calm


async def test_a_router_that_died_is_back_for_clients_that_try_again(
    mesh: RunningUp, expected: Expected
) -> None:
    os.kill(mesh.facts["pids"]["router"], signal.SIGKILL)
    prompt = expected.prompt(60)
    async with AsyncClient(mesh.grpc, retry=Retry(attempts=60, longest_pause_s=0.5)) as client:
        result = await client.complete(prompt, sampling=Sampling(max_tokens=TOKENS))
    assert result.text == expected.text(prompt)
    await mesh.until_whole()


async def test_streams_survive_the_death_of_a_rank(mesh: RunningUp, expected: Expected) -> None:
    (rank,) = mesh.ranks(group=1)
    await _streams_over_a_kill(mesh, expected, 50, rank.pid)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_frees_its_place(
    mesh: RunningUp, expected: Expected, *, streaming: bool
) -> None:
    body = {"prompt": expected.prompt(70), "max_tokens": 2000, "stream": streaming}
    async with (
        httpx.AsyncClient(base_url=mesh.http) as calls,
        AsyncFleetClient(mesh.facts["fleet"]) as fleet,
        asyncio.timeout(20),
    ):
        asking = asyncio.ensure_future(calls.post("/v1/completions", json=body))
        await _until_running(fleet, 1)
        asking.cancel()
        async with asyncio.timeout(2):
            await _until_running(fleet, 0)


async def _until_running(fleet: AsyncFleetClient, count: int) -> None:
    async for replicas in fleet.watch_fleet(min_interval_s=0.02):
        if sum(replica.running_count for replica in replicas) == count:
            return


async def test_a_refused_flag_ends_up(model_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "radixmesh.cli.main", "up", "--engine=fake", f"--model={model_dir}"),
        *("--port-base=0", "--policy=nothing"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert "--policy: " in errors.decode()


@pytest.mark.model
@pytest.mark.model
async def test_a_topology_that_the_model_does_not_have_ends_up() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "radixmesh.cli.main", "up", "--engine=torch", "--model=smollm2"),
        *("--port-base=0", "--tp=10"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    *before, last = errors.decode().splitlines()
    assert last.startswith("radixmesh up: worker-")
    assert last.endswith("--tp 10: the model has 9 query heads, one rank each")
    assert not any("starts again" in line for line in before)


async def test_a_ready_file_that_cannot_be_written_is_said_at_once(
    model_dir: Path, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "radixmesh.cli.main", "up", "--engine=fake", f"--model={model_dir}"),
        *("--port-base=0", f"--ready-file={tmp_path}/none/ready.json"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode() == f"radixmesh up: --ready-file: there is no folder {tmp_path}/none\n"


async def test_titles_name_the_services(mesh: RunningUp) -> None:
    titles = [" ".join(process.cmdline()) for process in mesh.tree()[1:]]
    services = {title.split()[0].removesuffix(":") for title in titles}
    assert services == {
        "radixmesh-router",
        "radixmesh-tokenizer",
        "radixmesh-detokenizer",
        "radixmesh-worker",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_everything(
    model_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with running_up(model_dir, tmp_path) as running:
        processes = running.tree()
        # up, router, two text services, two fronts with a fork server and a rank each
        assert len(processes) == 10
        assert await running.end(number) == 0
        assert await gone(processes) == []
        assert not running.ready_file.exists()


async def test_killing_up_leaves_nothing_behind(model_dir: Path, tmp_path: Path) -> None:
    async with running_up(model_dir, tmp_path) as running:
        processes = running.tree()
        running.process.kill()
        await running.process.wait()
        assert await gone(processes) == []


async def test_a_taken_port_is_named(mesh: RunningUp, model_dir: Path) -> None:
    base = mesh.facts["ports"]["http"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "radixmesh.cli.main", "up", "--engine=fake", f"--model={model_dir}"),
        f"--port-base={base}",
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert f"port {base} (http)" in errors.decode()


async def test_an_idle_mesh_uses_nearly_no_cpu(mesh: RunningUp) -> None:
    await mesh.until_whole()
    processes = mesh.tree()
    window_s = 5.0
    used = []
    # The quietest of some windows: other work on the machine makes waking up dearer.
    for _ in range(4):
        before = _cpu_seconds(processes)
        await asyncio.sleep(window_s)  # what is measured is what happens in it
        used.append((_cpu_seconds(processes) - before) / window_s)
    assert min(used) <= 0.02


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))
