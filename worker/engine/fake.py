"""An engine that computes no model but is exact: each id depends on all ids before it.

The state after a position is a 64-bit hash of that position's id seeded by the
state before; the next id is the ordinary vocabulary id at state mod their count,
unless the request bends that (`fake_draw.py`).
States live where a real engine keeps KV, in a pool addressed through the block
table, so a wrong, stale or missing block changes everything that follows.
Imports no torch.
"""

import os
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from radixmesh.errors import InvalidRequest
from worker.config import FakeConfig, RankConfig
from worker.engine.engine import EngineInfo, Row, StepPlan, StepResult
from worker.engine.fake_draw import FakeDraw
from worker.engine.faults import Fault, parse_faults
from worker.engine.vocabulary import Vocabulary
from worker.request import Tops

FIRST_STATE: Final = 0x9E3779B97F4A7C15
FAULT_EXIT_STATUS: Final = 17
_DEFAULT_BLOCK_TOKENS: Final = 16
_DEFAULT_KV_BLOCKS: Final = 4096


def next_state(state: int, token_id: int) -> int:
    """Return the state after one more id."""
    return xxhash.xxh3_64_intdigest(token_id.to_bytes(4, "little"), state)


class FakeEngine:
    """Draws ids as above, at a set pace, with scripted faults."""

    def __init__(
        self, vocabulary: Vocabulary, info: EngineInfo, fake: FakeConfig, faults: list[Fault]
    ) -> None:
        self._info = info
        self._fake = fake
        self._learn(vocabulary.ordinary)
        self._faults = faults
        self._states = array("Q")
        self._results: deque[StepResult] = deque()
        self._read: Sequence[int] = ()  # the vocabulary of weights that are not used yet
        self._readings = 0

    def __repr__(self) -> str:
        return f"<FakeEngine {self._info}>"

    @classmethod
    def load(cls, config: RankConfig) -> "FakeEngine":
        """Read the vocabulary of the model directory and make an empty pool.

        Raises:
            InvalidRequest: A file of the model or a fault's script can't be read.
        """
        vocabulary = Vocabulary.read(Path(config.model_dir))
        block_tokens = config.block_tokens or _DEFAULT_BLOCK_TOKENS
        by_tokens = -(-config.kv_tokens // block_tokens)
        info = EngineInfo(
            block_tokens=block_tokens,
            kv_blocks=config.fake.kv_blocks or by_tokens or _DEFAULT_KV_BLOCKS,
            max_model_len=config.max_model_len or vocabulary.max_model_len,
            vocab_size=vocabulary.size,
            eos_ids=vocabulary.eos_ids,
        )
        return cls(vocabulary, info, config.fake, parse_faults(config.fake.faults, config))

    @property
    def info(self) -> EngineInfo:
        """What it can take."""
        return self._info

    def reserve(self, kv_blocks: int) -> None:
        """Make the pool.

        Raises:
            InvalidRequest: There is no memory for it.
        """
        self._info = replace(self._info, kv_blocks=kv_blocks)
        tokens = kv_blocks * self._info.block_tokens
        try:
            self._states = array("Q", [0]) * tokens
        except (MemoryError, OverflowError) as error:
            raise InvalidRequest(
                f"--kv-tokens, --fake-kv-blocks: there is no memory for the states of {tokens} ids"
            ) from error

    def launch(self, plan: StepPlan) -> None:
        """Compute a step at once; its result waits for `collect`."""
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        """Return the oldest result."""
        return self._results.popleft()

    def read_weights(self, folder: Path) -> None:
        """Other weights draw other ids: the vocabulary is turned by the directory's name.

        Raises:
            InvalidRequest: There is no model in the directory, or one of another size; or
                a fault wants it so.
        """
        self._break_reading(folder)
        vocabulary = Vocabulary.read(folder)
        if vocabulary.size != self._info.vocab_size:
            raise InvalidRequest(
                f"{folder} has {vocabulary.size} ids, expected {self._info.vocab_size}"
            )
        turn = xxhash.xxh3_64_intdigest(folder.name.encode()) % len(vocabulary.ordinary)
        self._read = vocabulary.ordinary[turn:] + vocabulary.ordinary[:turn]

    def use_weights(self) -> None:
        """Draw from what was read."""
        self._learn(self._read)
        self._read = ()

    def drop_weights(self) -> None:
        """Forget what was read."""
        self._read = ()

    def _learn(self, ordinary: Sequence[int]) -> None:
        self._ordinary = ordinary
        self._drawing = FakeDraw(
            ordinary,
            vocab_size=self._info.vocab_size,
            eos_ids=self._info.eos_ids,
            eos_after=self._fake.eos_after,
        )

    def _run(self, plan: StepPlan) -> StepResult:
        """Compute the states of all rows and draw; takes as long as the pace says."""
        due = [fault.kind for fault in self._faults if plan.rows and fault.due(plan)]
        self._break_down(due)
        self._pace(plan)
        ids = []
        logprobs = []
        states = []
        prompt = []
        for row in plan.rows:
            state = self._compute(row)
            if row.targets:
                prompt.append(self._score(row, row.targets))
            if row.sampled:
                states.append(state)
                ids.append(self._drawing.draw(row, state))
                asked = row.sampling.logprobs
                logprobs.append(self._drawing.logprob(state, ids[-1]) if asked else float("nan"))
        drawing = (row.sampling for row in plan.rows if row.sampled)
        alternatives = [one.top_logprobs if one.logprobs else 0 for one in drawing]
        tops = self._drawing.tops(states, alternatives)
        if "desync" in due:
            ids = [self._ordinary[(one + 1) % len(self._ordinary)] for one in ids]
        return StepResult(ids=ids, logprobs=logprobs, tops=tops, prompt=prompt)

    def close(self) -> None:
        """Free the pool."""
        self._states = array("Q")

    def _compute(self, row: Row) -> int:
        state = self._states[self._slot(row, row.start - 1)] if row.start else FIRST_STATE
        for position, token_id in enumerate(row.ids, row.start):
            state = next_state(state, token_id)
            self._states[self._slot(row, position)] = state
        return state

    def _score(self, row: Row, targets: Sequence[int]) -> tuple[list[float], Tops]:
        places = range(row.start, row.start + len(targets))
        states = [self._states[self._slot(row, position)] for position in places]
        logprobs = [
            self._drawing.logprob(state, target)
            for state, target in zip(states, targets, strict=True)
        ]
        return logprobs, self._drawing.tops(states, [row.sampling.top_logprobs] * len(states))

    def _slot(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self._info.block_tokens)
        return row.blocks[block] * self._info.block_tokens + offset

    def _pace(self, plan: StepPlan) -> None:
        seconds = 0.0
        prefill = sum(len(row.ids) for row in plan.rows if row.prefills)
        if self._fake.prefill_tokens_per_s:
            seconds += prefill / self._fake.prefill_tokens_per_s
        if any(not row.prefills for row in plan.rows):
            seconds += self._fake.decode_ms / 1000
        if seconds:
            time.sleep(seconds)

    def _break_down(self, due: list[str]) -> None:
        if "exit" in due:
            os._exit(FAULT_EXIT_STATUS)
        if "raise" in due:
            raise RuntimeError("a scripted fault")
        while "hang" in due:
            time.sleep(3600)

    def _break_reading(self, folder: Path) -> None:
        self._readings += 1
        for fault in self._faults:
            if fault.kind == "delay":
                time.sleep(fault.number / 1000)
            elif fault.kind == "refuse" and fault.number == self._readings:
                raise InvalidRequest(f"a scripted fault: {folder} can't be read")
