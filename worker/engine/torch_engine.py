"""The engine that computes: transformers' modules over our paged KV pool.

Knows how to load a rank's shard, run a flat batch through it and draw with the other
ranks; knows no requests, no scheduler and no sockets. The model code is transformers'
own, so one rank alone serves every architecture whose modules take an attention
function; what the pool holds per layer is learned from one pass over one id.
"""

import logging
import math
from array import array
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radixmesh.errors import InvalidRequest, NotSupported
from worker.config import RankConfig
from worker.engine.attention import ATTENTION, KvPool, KvProbe, KvShape, PagedStep, register
from worker.engine.drawing import decode, draw_step, encode
from worker.engine.engine import EngineInfo, Row, StepPlan, StepResult, run_step
from worker.engine.inputs import Batch, make_batch
from worker.model.load import LoadedModel, choose_device, choose_dtype, load_model
from worker.model.parallel_modules import connect
from worker.model.update import apply_update, read_update
from worker.parallel.group import Alone, OneStage, Stages, TensorGroup
from worker.parallel.split import Seat
from worker.request import Sampling

if TYPE_CHECKING:
    from worker.parallel.join import Peers

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_TOKENS = 16
_WARM_UP_IDS = 64


class TorchEngine:
    """One rank's shard of a model, its pages and nothing else. Implements `engine.Engine`."""

    def __init__(
        self,
        model: LoadedModel,
        shapes: list[KvShape],
        info: EngineInfo,
        group: TensorGroup,
        stages: Stages,
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._pool = KvPool([], blocks=0, block_tokens=1, dtype=model.dtype, device=model.device)
        self._info = info
        self._group = group
        self._stages = stages
        self._results: deque[StepResult] = deque()
        self._update: dict[str, Tensor] = {}  # read, and not used yet
        connect(model.module, group)

    @classmethod
    def load(cls, config: RankConfig, peers: "Peers | None" = None) -> "TorchEngine":
        """Join the other ranks (those of `peers`, where given), load and size the pool.

        Nothing is exchanged with them before `reserve`.

        Raises:
            InvalidRequest: A setting or the model directory is wrong.
            NotSupported: The model or the topology needs what this engine does not do.
            PeerLost: Another rank did not come.
        """
        if config.threads > 0:
            torch.set_num_threads(config.threads)
        register()
        group, stages = _peers(config, peers)
        model = load_model(
            Path(config.model_dir),
            attention=ATTENTION,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            device_index=config.device,
            seat=Seat(tp=config.tp, tp_rank=config.tp_rank, pp=config.pp, pp_rank=config.pp_rank),
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
        engine = cls(model, shapes, info, group, stages)
        logger.info(
            "model loaded",
            extra={"dtype": str(model.dtype), "device": str(model.device), "kv_blocks": blocks},
        )
        return engine

    @property
    def info(self) -> EngineInfo:
        """What it can take; until `reserve`, what this rank's shard could hold."""
        return self._info

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV cache and logits."""
        return self._model.dtype

    def reserve(self, kv_blocks: int) -> None:
        """Make the pool and warm up, together with the other ranks.

        Raises:
            InvalidRequest: There is no memory for it.
            PeerLost: One of them did not answer.
        """
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
        """Compute this stage's part of a step.

        The last stage draws, and tells the others; its own result waits for `collect`.

        Raises:
            PeerLost: Another rank is gone or did not answer in time.
            RankDesync: Another rank computes another plan.
        """
        self._group.begin(plan.digest)
        output = self._compute(plan)
        if not self._model.draws:
            self._stages.send(output, plan.digest)
            return
        result = draw_step(output, plan, self._group, self._model.vocabularies)
        if self._stages.size > 1:
            self._stages.publish(encode(result))
        self._results.append(result)

    def collect(self) -> StepResult:
        """Return the oldest result; a stage that is not the last waits for it.

        Raises:
            PeerLost: The last stage did not tell it in time.
        """
        return self._results.popleft() if self._model.draws else decode(self._stages.result())

    def read_weights(self, folder: Path) -> None:
        """Read this rank's part of other weights; nothing is exchanged with other ranks.

        Raises:
            InvalidRequest, NotSupported: They can't be read, or don't fit this model.
        """
        self._update = read_update(self._model, folder)

    def use_weights(self) -> None:
        """Copy what was read into the model."""
        apply_update(self._model, self._update)
        self._update = {}

    def drop_weights(self) -> None:
        """Free what was read."""
        self._update = {}

    def logits(self, rows: tuple[Row, ...]) -> Tensor:
        """Compute rows; return [positions to keep, this rank's vocabulary] in the model's dtype.

        Of a stage that is not the last: its activations [ids, width].
        """
        return self._compute(StepPlan(0, rows))

    def close(self) -> None:
        """Let the other ranks go; free model and pool."""
        self._group.close()
        self._stages.close()
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
            greedy = Sampling(seed=0, temperature=0.0)
            decode_row = Row(0, ids[:1], count, table, True, 1, greedy)
            run_step(self, StepPlan(0, (decode_row,)))

    def _compute(self, plan: StepPlan) -> Tensor:
        batch = make_batch(
            plan.rows,
            block_tokens=self._info.block_tokens,
            dtype=self._model.dtype,
            device=self._model.device,
        )
        hidden = None
        if not self._model.embeds:
            shape = (batch.ids.shape[1], self._model.width)
            hidden = self._stages.receive(shape, digest=plan.digest)
        return forward(self._model, batch, PagedStep(self._pool, batch), hidden)


def _peers(config: RankConfig, peers: "Peers | None") -> tuple[TensorGroup, Stages]:
    if peers is not None:
        return peers.group, peers.stages
    if config.tp * config.pp == 1:
        return Alone(), OneStage()
    # Not at the top: a rank that is alone needs no torch.distributed.
    from worker.parallel.join import join

    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what NCCL takes where no tensor says it
    joined = join(config, choose_dtype(config.dtype, device), device)
    return joined.group, joined.stages


def forward(
    model: LoadedModel, batch: Batch, paged: PagedStep | KvProbe, hidden: Tensor | None = None
) -> Tensor:
    """Run a stage's module over a flat batch.

    Args:
        model: This rank's shard.
        batch: The step.
        paged: Its attention.
        hidden: [ids, width] of the stage before; None where the stage embeds ids.

    Returns:
        Logits [keep, this rank's vocabulary], or, before the last stage, [ids, width].
    """
    inputs = {"input_ids": batch.ids} if hidden is None else {"inputs_embeds": hidden[None]}
    inputs |= {"position_ids": batch.positions}
    with torch.inference_mode():
        if model.draws:
            keep = {"logits_to_keep": batch.keep}
            output = model.module(**inputs, **keep, use_cache=False, paged=paged).logits
        else:
            output = model.module.model(**inputs, use_cache=False, paged=paged).last_hidden_state
    rows: Tensor = output[0]
    return rows


def probe(model: LoadedModel) -> list[KvShape]:
    """Return what each layer of this rank keeps per position, from one pass over one id.

    Before `connect`, so it needs no other rank.

    Raises:
        NotSupported: A layer keeps something else than keys and values, or attends in
            a way that the paged attention does not do.
    """
    spy = KvProbe(model.max_model_len)
    row = Row(0, array("I", [0]), 0, [0], True, 0, Sampling(seed=0))
    batch = make_batch([row], block_tokens=1, dtype=model.dtype, device=model.device)
    hidden = None
    if not model.embeds:
        hidden = torch.zeros(1, model.width, dtype=model.dtype, device=model.device)
    try:
        output = forward(model, batch, spy, hidden)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotSupported(f"the model does not take a flat batch: {error}") from error
    if sorted(spy.shapes) != list(range(model.layers)):
        raise NotSupported("the model has layers without paged attention")
    if model.shard is None and output.shape != (1, model.vocab_size):
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
