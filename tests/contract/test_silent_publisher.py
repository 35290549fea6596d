"""A group that keeps prefixes and tells nobody: its view is not trusted, own routing is."""

from pathlib import Path
from typing import Any

from radixmesh.models import tokenizer_fingerprint
from radixmesh.rpc.link import Lane
from radixmesh.worker.v1 import feed_pb2
from radixmesh.worker.v1.worker_service_pb2 import AttachResponse
from router.fleet.registry import Fleet
from router.policy.choice import View
from tests.fakes.fleet import Output, ask, running_fleet, spec, until
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import run_mesh
from tests.fakes.worker import FakeWorker
from tests.fakes.worker_cache import FakeCache

PROMPT = list(range(100, 134))  # 8 blocks, and a beginning of one
STORY = "Once upon a time there was a small model that lived in a cache."


class SecretiveWorker(FakeWorker):
    """Its cache works and its feed is that of an empty one: no event, proofs of nothing."""

    def _publish(self, event: feed_pb2.CacheEvent) -> None:
        del event

    def prove(self) -> None:
        empty = [FakeCache(rank, one.cache.incarnation) for rank, one in enumerate(self.replicas)]
        proofs = AttachResponse(digests=[cache.digest() for cache in empty])
        for handler in self._handlers:
            handler.session.send(AttachResponse(loads=[self._load(handler)]), Lane.CONTROL)
            handler.session.send(proofs, Lane.FEED)


async def run(fleet: Fleet, prompt: list[int]) -> Output:
    output = Output()
    fleet.submit(fleet.place(ask(prompt)), spec(prompt), output)
    await output.ended()
    return output


async def test_what_is_reused_and_was_never_told_of_gives_it_away() -> None:
    async with SecretiveWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        assert fleet.replicas()[0].view is View.EXACT
        assert (await run(fleet, PROMPT)).cached_tokens == 0
        assert (await run(fleet, PROMPT)).cached_tokens == 32
        await until(fleet, lambda: fleet.replicas()[0].view is View.DEGRADED)
        # From now on what was sent there is taken to be there.
        assert fleet.place(ask(PROMPT)).predicted_blocks == 0
        assert fleet.place(ask(PROMPT)).predicted_blocks == 8
        assert worker.resnapshots == 0, "it would say the same again"


async def test_an_open_group_is_never_suspected_however_much_it_reuses() -> None:
    async with FakeWorker(dp=2) as worker, running_fleet(worker.address, ready=2) as fleet:
        for number in range(60):
            shared = PROMPT[: 8 + 4 * (number % 7)]
            await run(fleet, [*shared, 500 + number])
            assert {one.view for one in fleet.replicas()} == {View.EXACT}
        # What was reused is evicted before its proof comes.
        for rank, replica in enumerate(worker.replicas):
            worker.evict(rank, list(reversed(replica.cache.keys)))
        for _ in range(5):
            worker.prove()
            await fleet.changed()
        assert {one.view for one in fleet.replicas()} == {View.EXACT}


async def test_it_shows_on_the_metrics_page_and_its_requests_find_their_prefix_again(
    model_dir: Path,
) -> None:
    said: dict[str, Any] = {
        "fingerprint": tokenizer_fingerprint(model_dir),
        "ordinary": ordinary_ids(model_dir),
    }
    async with SecretiveWorker(**said) as one, SecretiveWorker(**said) as two:
        groups = (f"a={one.address}", f"b={two.address}")
        async with run_mesh(model_dir, workers=0, extra_groups=groups) as mesh:
            metrics = {"radixmesh_router_view_losses_total": 0.0}
            while not metrics["radixmesh_router_view_losses_total"]:
                await mesh.generate(STORY, 2)
                metrics = await mesh.metrics()
            receipt = (await mesh.generate(STORY, 2)).finishes[0].receipt
            while not receipt.predicted_blocks:
                receipt = (await mesh.generate(STORY, 2)).finishes[0].receipt
            for _ in range(6):
                again = (await mesh.generate(STORY, 2)).finishes[0].receipt
                assert again.group_id == receipt.group_id
                assert again.predicted_blocks == again.actual_blocks == again.prompt_blocks
            await mesh.until_nothing_is_held()
