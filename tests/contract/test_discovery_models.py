"""Two models in one fleet: each has its own tokenizers, tree and namespaces."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer

from radixmesh.models import tokenizer_fingerprint
from radixmesh.router.v1 import fleet_service_pb2, router_service_pb2
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import LOOPBACK, RouterMesh, Text, run_mesh
from tests.fakes.worker import FakeWorker
from tokenizer_svc.app import serve_detokenizer, serve_tokenizer
from tokenizer_svc.settings import DetokenizerSettings, TokenizerSettings

PROMPT = "The quick brown fox jumps over the lazy dog, once upon a time."
Run = Callable[[asyncio.Event, Callable[[int], None]], Coroutine[Any, Any, None]]


@pytest.fixture
def other_dir(model_dir: Path, tmp_path: Path) -> Path:
    """Another model: the same text is other ids there."""
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(" fox"), AddedToken(" time")])
    tokenizer.save(str(other / "tokenizer.json"))
    return other


@asynccontextmanager
async def service(run: Run) -> AsyncGenerator[str]:
    """A text service in this process; yields its address."""
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run(stop, port.set_result))
    try:
        yield f"{LOOPBACK}:{await port}"
    finally:
        stop.set()
        await task


def texts_of(model_dir: Path) -> tuple[Run, Run]:
    flags: Any = {"model": str(model_dir), "model_name": "other", "port": 0}
    return (
        lambda stop, on_ready: serve_tokenizer(TokenizerSettings(**flags), stop, on_ready=on_ready),
        lambda stop, on_ready: serve_detokenizer(
            DetokenizerSettings(**flags), stop, on_ready=on_ready
        ),
    )


class Both:
    """A mesh of `tiny`, to which the services of `other` were added."""

    def __init__(self, mesh: RouterMesh, worker: FakeWorker, text: Text) -> None:
        self.mesh = mesh
        self.worker = worker
        self.text = text


@pytest_asyncio.fixture
async def both(model_dir: Path, other_dir: Path, tmp_path: Path) -> AsyncGenerator[Both]:
    async with AsyncExitStack() as stack:
        encode, decode = [
            await stack.enter_async_context(service(run)) for run in texts_of(other_dir)
        ]
        worker = await stack.enter_async_context(
            FakeWorker(
                model="other",
                vocab_size=1002,
                fingerprint=tokenizer_fingerprint(other_dir),
                ordinary=ordinary_ids(other_dir),
            )
        )
        members = tmp_path / "members.yaml"
        members.write_text(
            f"groups: [other={worker.address}]\ntokenizers: ['{encode}']\n"
            f"detokenizers: ['{decode}']\n"
        )
        mesh = await stack.enter_async_context(
            run_mesh(model_dir, workers=1, members_file=members, ready_wait_s=3)
        )
        async with asyncio.timeout(8):
            while await served(mesh) != {"tiny": 1, "other": 1}:  # noqa: ASYNC110 - it is asked
                await asyncio.sleep(0.02)
        yield Both(mesh, worker, Text(other_dir))


async def served(mesh: RouterMesh) -> dict[str, int]:
    said = await mesh.stub.ListModels(router_service_pb2.ListModelsRequest())
    return {model.name: model.ready_replica_count for model in said.models}


async def test_each_model_has_its_own_tokenizer_and_gets_its_own_text(both: Both) -> None:
    mesh = both.mesh
    assert mesh.text.prompt_ids(PROMPT) != both.text.prompt_ids(PROMPT)
    for _ in range(3):
        tiny, other = await asyncio.gather(
            mesh.generate(PROMPT, 12, model="tiny"), mesh.generate(PROMPT, 12, model="other")
        )
        assert tiny.text == mesh.text.output(PROMPT, 12)
        assert other.text == both.text.output(PROMPT, 12)
    assert [len(mesh.workers[0].submits), len(both.worker.submits)] == [3, 3]
    assert {one.fingerprint for one in both.worker.submits} != {
        one.fingerprint for one in mesh.workers[0].submits
    }


async def test_what_one_model_holds_is_nothing_to_the_other(both: Both) -> None:
    mesh = both.mesh
    await mesh.generate(PROMPT, 4, model="tiny")
    await mesh.until_cached("g0", 1)

    async def explained(model: str) -> dict[str, int]:
        request = router_service_pb2.GenerateRequest(text=PROMPT, model=model)
        asked = fleet_service_pb2.ExplainRouteRequest(request=request)
        said = await mesh.fleet.ExplainRoute(asked)
        return {one.group_id: one.matched_blocks for one in said.candidates}

    tiny = await explained("tiny")
    assert list(tiny) == ["g0"]
    assert tiny["g0"] > 0
    assert await explained("other") == {"other": 0}


async def test_without_a_name_a_request_is_refused_where_there_are_two(both: Both) -> None:
    url = f"http://{LOOPBACK}:{both.mesh.ports.http}"
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    assert names == ["other", "tiny"]


async def test_a_model_whose_last_group_left_is_unknown_and_the_other_goes_on(both: Both) -> None:
    mesh = both.mesh
    await mesh.fleet.RemoveGroup(fleet_service_pb2.RemoveGroupRequest(group_id="other"))
    url = f"http://{LOOPBACK}:{mesh.ports.http}"
    async with httpx.AsyncClient(base_url=url) as http:
        body = {"model": "other", "prompt": "hi", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body)).status_code == 404
    assert (await mesh.generate(PROMPT, 4, model="tiny")).text == mesh.text.output(PROMPT, 4)
