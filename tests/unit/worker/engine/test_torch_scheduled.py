"""The torch engine under the real scheduler and prefix cache, against transformers' generate.

Run: pytest tests/unit/worker/engine/test_torch_scheduled.py
"""

import random
from collections import defaultdict
from pathlib import Path

import pytest

from radixmesh.blocks import Namespace, pack_ids, unpack_ids
from tests.fakes.plans import reserved
from tests.fakes.tiny_models import VOCAB_SIZE, generate, make_tiny_model
from worker.config import RankConfig
from worker.engine.engine import run_step
from worker.engine.torch_engine import TorchEngine
from worker.kvcache.radix import PrefixCache
from worker.request import Add, Sampling
from worker.schedule.limits import Limits
from worker.schedule.scheduler import Scheduler

COUNT = 10
NAMESPACE = Namespace(model="tiny").encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


class Replica:
    """One engine with its scheduler, stepped by hand."""

    def __init__(self, folder: Path, *, kv_tokens: int, max_batched_tokens: int) -> None:
        config = RankConfig(
            model_dir=str(folder),
            dtype="float32",
            block_tokens=8,
            kv_tokens=kv_tokens,
            max_batched_tokens=max_batched_tokens,
            threads=1,
        )
        self._engine = reserved(TorchEngine.load(config))
        info = self._engine.info
        cache = PrefixCache(block_count=info.kv_blocks, block_tokens=info.block_tokens)
        self._scheduler = Scheduler(Limits.of(config, info), cache)
        self._step = 0
        self.cached: dict[int, int] = {}

    def generate(self, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
        adds = [
            Add(
                request_id=number,
                prompt=pack_ids(prompt),
                output=b"",
                sampling=Sampling(seed=0, temperature=0.0, max_tokens=COUNT),
                namespace=NAMESPACE,
            )
            for number, prompt in prompts.items()
        ]
        outputs: dict[int, list[int]] = defaultdict(list)
        self._scheduler.apply(adds, now_us=0)
        while not self._scheduler.idle:
            self._step += 1
            plan = self._scheduler.plan(self._step)
            self._scheduler.commit(plan, run_step(self._engine, plan))
            said = self._scheduler.take_output(self._step)
            assert not said.failed
            self.cached |= {one.request_id: one.cached_tokens for one in said.started}
            for number, token in zip(said.request_ids, unpack_ids(said.token_ids), strict=True):
                outputs[number].append(token)
        return outputs


@pytest.mark.parametrize(("kv_tokens", "max_batched_tokens"), [(512, 256), (512, 9), (128, 24)])
def test_shared_prefixes_chunks_and_retraction_change_no_id(
    folder: Path, kv_tokens: int, max_batched_tokens: int
) -> None:
    draw = random.Random(3)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(32)]
    prompts = {
        number: shared[: 8 * (number % 5)] + [draw.randrange(VOCAB_SIZE) for _ in range(number)]
        for number in range(1, 9)
    }
    expected = {number: generate(folder, prompt, COUNT) for number, prompt in prompts.items()}
    replica = Replica(folder, kv_tokens=kv_tokens, max_batched_tokens=max_batched_tokens)
    assert replica.generate(prompts) == expected


def test_a_second_turn_reuses_the_first_and_gives_the_same_ids(folder: Path) -> None:
    draw = random.Random(4)
    first = [draw.randrange(VOCAB_SIZE) for _ in range(30)]
    replica = Replica(folder, kv_tokens=512, max_batched_tokens=256)
    answer = replica.generate({1: first})[1]
    second = first + answer + [draw.randrange(VOCAB_SIZE) for _ in range(7)]
    outputs = replica.generate({2: second})
    assert replica.cached == {1: 0, 2: 32}
    assert outputs[2] == generate(folder, second, COUNT)
