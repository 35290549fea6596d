"""Groups that send ids that can't be: the stream goes on elsewhere, and its client never knows."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from radixmesh.blocks import pack_ids
from radixmesh.models import tokenizer_fingerprint
from radixmesh.router.v1 import fleet_service_pb2
from radixmesh.router.v1.router_service_pb2 import RoutingHint
from radixmesh.rpc.link import Lane
from radixmesh.worker.v1.worker_service_pb2 import AttachResponse, Started, Step
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import RouterMesh, run_mesh
from tests.fakes.worker import STOP_TOKEN, FakeWorker

PROMPT, COUNT, HONEST = "Once upon a time there was a fox.", 12, 3
READY = fleet_service_pb2.REPLICA_PHASE_READY
Says = Callable[["Liar", int, Any], None]


class Liar(FakeWorker):
    """Says some ids as they are, then something else."""

    says: Says

    def _one_id(self, rank: int, run: Any) -> None:
        if run.position < HONEST:
            super()._one_id(rank, run)
        else:
            self.says(self, rank, run)

    def send(self, rank: int, run: Any, ids: Sequence[int], finish: int = 0) -> None:
        """Send ids at the next position."""
        step = Step(
            dp_rank=rank,
            incarnation=self.replicas[rank].cache.incarnation,
            entry_ids=[run.submit.entry_id],
            positions=[run.position],
            counts=[len(ids)],
            finishes=[finish],  # type: ignore[list-item]
            token_ids=pack_ids(ids),
        )
        run.handler.session.send(AttachResponse(steps=[step]), Lane.CONTROL)


@asynccontextmanager
async def lied_to(model_dir: Path, says: Says) -> AsyncGenerator[RouterMesh]:
    """A mesh of a group that is right, `g0`, and one that lies."""
    tokens: dict[str, Any] = {
        "fingerprint": tokenizer_fingerprint(model_dir),
        "ordinary": ordinary_ids(model_dir),
    }
    async with Liar(**tokens) as liar:
        liar.says = says
        async with run_mesh(model_dir, workers=1, extra_groups=(f"liar={liar.address}",)) as mesh:
            watching = mesh.fleet.WatchFleet(fleet_service_pb2.WatchFleetRequest(), timeout=5)
            async for said in watching:
                if sum(one.phase == READY for one in said.replicas) == 2:
                    break
            watching.cancel()
            yield mesh


@pytest.mark.parametrize(
    "says",
    [
        lambda liar, rank, run: liar.send(rank, run, [1 << 31]),
        lambda liar, rank, run: liar.send(rank, run, [run.ids[run.position]] * COUNT),
        lambda liar, rank, run: liar.send(rank, run, [], STOP_TOKEN),
    ],
    ids=["no id of the vocabulary", "more ids than asked for", "a stop id that is none"],
)
async def test_ids_that_can_not_be_are_asked_for_elsewhere(model_dir: Path, says: Says) -> None:
    async with lied_to(model_dir, says) as mesh:
        got = await mesh.generate(PROMPT, COUNT, routing=RoutingHint(group_id="liar"))
        assert got.ids[0] == mesh.text.output_ids(PROMPT, COUNT)
        assert got.text == mesh.text.output(PROMPT, COUNT)
        receipt = got.finishes[0].receipt
        assert (receipt.group_id, receipt.last_group_id, receipt.attempts) == ("liar", "g0", 2)
        await mesh.until_nothing_is_held()


def starts_again(liar: Liar, rank: int, run: Any) -> None:
    started = Started(entry_id=run.submit.entry_id, cached_tokens=(1 << 32) - 1)
    run.handler.session.send(AttachResponse(started=[started]), Lane.CONTROL)
    FakeWorker._one_id(liar, rank, run)


async def test_a_prompt_is_not_found_twice_nor_more_of_it_than_there_is(model_dir: Path) -> None:
    async with lied_to(model_dir, starts_again) as mesh:
        for _ in range(2):
            got = await mesh.generate(PROMPT, COUNT, routing=RoutingHint(group_id="liar"))
        usage = got.finishes[0].usage
        assert 0 < usage.cached_tokens <= usage.prompt_tokens
        listed = await mesh.fleet.ListReplicas(fleet_service_pb2.ListReplicasRequest())
        [row] = [row for row in listed.replicas if row.group_id == "liar"]
        assert row.cached_token_count == usage.cached_tokens
