"""The engine that computes: transformers' modules over our paged KV pool.

Knows how to load a shard, run a flat batch and draw from its logits; knows no
requests, no scheduler and no sockets. The model code is transformers' own, so
every architecture whose modules take an attention function is served; what the
pool holds per layer is learned from one pass over one id.
"""

import logging
import math
from array import array
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from radixmesh.errors import InvalidRequest, NotSupported
from worker.config import RankConfig
from worker.engine.attention import ATTENTION, KvPool, KvProbe, KvShape, PagedStep, register
from worker.engine.engine import EngineInfo, Row, StepPlan, StepResult, run_step
from worker.engine.inputs import Batch, make_batch
from worker.engine.sampler import draw
from worker.model.load import LoadedModel, load_model
from worker.request import Sampling

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_TOKENS = 16
_WARM_UP_IDS = 64


class TorchEngine:
    """One rank's model, its pages and nothing else. Implements `engine.Engine`."""

    def __init__(self, model: LoadedModel, shapes: list[KvShape], info: EngineInfo) -> None:
        self._model = model
        self._shapes = shapes
        self._pool = KvPool([], blocks=0, block_tokens=1, dtype=model.dtype, device=model.device)
        self._info = info
        self._results: deque[StepResult] = deque()

    @classmethod
    def load(cls, config: RankConfig) -> "TorchEngine":
        """Load, size the pool, warm up.

        Raises:
            InvalidRequest: A setting or the model directory is wrong.
            NotSupported: The model or the topology needs what this engine does not do.
        """
        if config.tp != 1 or config.pp != 1:
            raise NotSupported("the torch engine runs with --tp 1 and --pp 1 only")
        if config.threads > 0:
            torch.set_num_threads(config.threads)
        register()
        model = load_model(
            Path(config.model_dir),
            attention=ATTENTION,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            device_index=config.dp_rank,
        )
        shapes = probe(model)
        block_tokens = config.block_tokens or DEFAULT_BLOCK_TOKENS
        blocks = count_blocks(shapes, model.dtype, block_tokens, config)
        info = EngineInfo(
            block_tokens=block_tokens,
            kv_blocks=blocks,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
        )
        engine = cls(model, shapes, info)
        logger.info(
            "model loaded",
            extra={"dtype": str(model.dtype), "device": str(model.device), "kv_blocks": blocks},
        )
        return engine

    @property
    def info(self) -> EngineInfo:
        """What it can take."""
        return self._info

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV cache and logits."""
        return self._model.dtype

    def reserve(self, kv_blocks: int) -> None:
        """Make the pool and warm up."""
        self._pool = KvPool(
            self._shapes,
            blocks=kv_blocks,
            block_tokens=self._info.block_tokens,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        self._info = replace(self._info, kv_blocks=kv_blocks)
        self.warm_up()

    def launch(self, plan: StepPlan) -> None:
        """Compute a step; its result waits for `collect`."""
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        """Return the oldest result."""
        return self._results.popleft()

    def update_weights(self, folder: Path) -> None:
        """Not yet."""
        raise InvalidRequest(f"cannot load {folder} into a running engine")

    def _run(self, plan: StepPlan) -> StepResult:
        draws = draw(self.logits(plan.rows), [row for row in plan.rows if row.sampled])
        if draws.unusable_rows:
            logger.warning(
                "logits are not numbers", extra={"step": plan.step, "rows": draws.unusable_rows}
            )
        return StepResult(draws.ids, draws.logprobs)

    def logits(self, rows: tuple[Row, ...]) -> Tensor:
        """Compute rows and return [rows that draw, vocabulary] in the model's dtype."""
        batch = make_batch(
            rows,
            block_tokens=self._info.block_tokens,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        return forward(self._model, batch, PagedStep(self._pool, batch))

    def close(self) -> None:
        """Free model and pool."""
        del self._model, self._pool
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """Run a prefill and a decode, so that no request pays for first-time set-up."""
        room = self._info.kv_blocks * self._info.block_tokens
        count = max(1, min(_WARM_UP_IDS, self._info.max_model_len - 1, room - 1))
        ids = array("I", [0] * count)
        table = list(range(self._info.kv_blocks))[: count // self._info.block_tokens + 1]
        sampling = Sampling(seed=0, top_p=0.9, logprobs=True)
        run_step(self, StepPlan(0, (Row(0, ids, 0, table, True, 0, sampling),)))
        if count + 1 <= room:
            decode = Row(0, ids[:1], count, table, True, 1, sampling)
            run_step(self, StepPlan(0, (decode,)))


def forward(model: LoadedModel, batch: Batch, paged: PagedStep | KvProbe) -> Tensor:
    """Run the module over a flat batch; return the logits of the batch's `keep`."""
    with torch.inference_mode():
        output = model.module(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.keep,
            paged=paged,
        )
    logits: Tensor = output.logits[0]
    return logits


def probe(model: LoadedModel) -> list[KvShape]:
    """Return what each layer keeps per position, from one pass over one id.

    Raises:
        NotSupported: A layer keeps something else than keys and values, or attends in
            a way that the paged attention does not do.
    """
    spy = KvProbe(model.max_model_len)
    row = Row(0, array("I", [0]), 0, [0], True, 0, Sampling(seed=0))
    batch = make_batch([row], block_tokens=1, dtype=model.dtype, device=model.device)
    try:
        logits = forward(model, batch, spy)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotSupported(f"the model does not take a flat batch: {error}") from error
    if sorted(spy.shapes) != list(range(model.layers)):
        raise NotSupported("the model has layers without paged attention")
    if logits.shape != (1, model.vocab_size):
        raise NotSupported("the model does not give logits for chosen positions only")
    return [spy.shapes[layer] for layer in range(model.layers)]


def count_blocks(
    shapes: list[KvShape], dtype: torch.dtype, block_tokens: int, config: RankConfig
) -> int:
    """Return how many blocks the pool has: by `kv_tokens`, else by `kv_bytes`.

    Raises:
        InvalidRequest: Not one block fits.
    """
    if config.kv_tokens > 0:
        blocks, flag = math.ceil(config.kv_tokens / block_tokens), "--kv-tokens"
    else:
        per_block = block_tokens * sum(shape.bytes_per_token(dtype) for shape in shapes)
        blocks, flag = config.kv_bytes // per_block, "--kv-bytes"
    if blocks < 1:
        raise InvalidRequest(f"{flag}: not one block of {block_tokens} ids fits")
    return blocks
