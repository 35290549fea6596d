"""A seed's ids, from a whole group: alone, in a batch of 32, and resumed on another replica."""

from pathlib import Path
from typing import Any

import pytest

from radixmesh.blocks import pack_ids
from radixmesh.common.v1.sampling_pb2 import SamplingParams
from tests.fakes.model_dir import VOCAB_SIZE, make_model_dir
from tests.fakes.router_end import Output, RouterEnd, attach
from tests.fakes.tiny_models import NINE_HEADS, make_tiny_model
from tests.fakes.worker_front import run_front

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

COUNT = 16
PROMPT = [10 + 7 * at % 90 for at in range(45)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nine")
    make_model_dir(folder)
    return make_tiny_model(folder, "llama", vocab_size=VOCAB_SIZE, **NINE_HEADS)


def draw(router: RouterEnd, seed: int, dp_rank: int, drawn: list[int] | None = None) -> Output:
    """Ask for an output of this seed, on a replica, after the ids that are drawn already."""
    sampling = SamplingParams(seed=seed, temperature=1.5, top_p=0.95)
    journal = pack_ids(drawn or [])
    output = router.submit(
        PROMPT, max_tokens=COUNT, dp_rank=dp_rank, sampling=sampling, output_ids=journal
    )
    output.ids = list(drawn or [])
    return output


@pytest.mark.parametrize(
    "flags",
    [
        {"engine": "fake", "tp": 2, "fake_decode_ms": 1},
        {"engine": "torch", "dtype": "float32", "threads": 1, "kv_tokens": 4096},
    ],
    ids=["fake", "torch"],
)
async def test_a_seed_gives_the_same_ids_alone_in_a_batch_of_32_and_resumed_elsewhere(
    model: Path, flags: dict[str, Any]
) -> None:
    flags = {**flags, "dp": 2, "max_running": 32, "max_batched_tokens": 64}
    async with run_front(model, **flags) as address, attach(address) as router:
        await router.until_up(0, 1)
        alone = await draw(router, 7, 0).result()
        assert len(alone) == COUNT
        batch = [draw(router, seed, 0) for seed in range(32)]
        together = [await output.result() for output in batch]
        assert together[7] == alone
        if flags["engine"] == "torch":  # the fake engine looks at no seed
            assert len({tuple(ids) for ids in together}) == 32
        # Each stopped somewhere else; all go on beside each other on the other replica.
        resumed = [
            draw(router, seed, 1, ids[: 1 + seed % (COUNT - 1)])
            for seed, ids in enumerate(together)
        ]
        assert [await output.result() for output in resumed] == together
