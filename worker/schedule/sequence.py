"""One request inside a replica: its ids, how far they are computed, when it ends. Pure."""

from radixmesh.blocks import ID_BYTES
from worker.kvcache.keyed import KeyedIds
from worker.kvcache.radix import Chain
from worker.request import GOES_ON, LENGTH, STOP_TOKEN, Add
from worker.schedule.limits import Limits


class Sequence:
    """A request's state; the same on every rank.

    Attributes:
        keyed: Prompt and output ids with their block keys.
        prompt_tokens: How many of them are the prompt.
        chain: Its blocks while it runs, else None.
        computed: How many leading ids have their KV in `chain`.
        planned: How many have it there once the steps under way are done.
        pending: Ids that steps under way draw for it.
        drawn_in: Number of the last step that draws for it; draw_index: which of its draws.
        residence: How often it has begun to run; tells whether a result is still its own.
        scored: Prompt position up to which logprobs are told; they are never told twice.
        started: Whether it ever ran; it is announced once.
        uncached: Ids to compute as it looked when it was queued; what a sibling computes counts
            only there.
        brings: Keys of blocks that were not cached when it was queued, those of siblings too.
        order: What goes first: higher priority, then earlier arrival.
        waits_at: Blocks cached for it when it last began to wait for a sibling; -1: never.
        waits_since_us: When that was.
        deadline_us: On rank (0, 0)'s clock; 0 means none.
    """

    def __init__(
        self, add: Add, *, limits: Limits, block_tokens: int, arrival: int, now_us: int
    ) -> None:
        self.request_id = add.request_id
        self.sampling = add.sampling
        self.keyed = KeyedIds(
            add.prompt + add.output, namespace=add.namespace, block_tokens=block_tokens
        )
        self.prompt_tokens = len(add.prompt) // ID_BYTES
        self.chain: Chain | None = None
        self.computed = 0
        self.planned = 0
        self.pending = 0
        self.drawn_in = -1
        self.draw_index = 0
        self.residence = 0
        # Position 0 has no logprob. A resume has told those of its prompt before.
        scores = add.sampling.prompt_logprobs and not add.output
        self.scored = 0 if scores else self.prompt_tokens - 1
        self.started = False
        self.uncached = len(self.keyed)
        self.brings: list[int] = []
        self.order = (-add.priority, arrival)
        self.accepted_us = now_us
        self.waits_at = -1
        self.waits_since_us = 0
        self.deadline_us = now_us + add.timeout_ms * 1000 if add.timeout_ms else 0
        self._ends = frozenset(add.sampling.stop_ids) | (
            frozenset() if add.sampling.ignore_eos else limits.eos_ids
        )
        self._banned = tuple(sorted(self._ends))
        self._min_output = add.sampling.min_tokens
        self._max_output = min(add.sampling.max_tokens, limits.max_model_len - self.prompt_tokens)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} prompt={self.prompt_tokens} "
            f"output={self.output_tokens} computed={self.computed} planned={self.planned}>"
        )

    def __len__(self) -> int:
        return len(self.keyed.ids)

    @property
    def output_tokens(self) -> int:
        """Ids after the prompt's end; the position of the next one that becomes known."""
        return len(self.keyed.ids) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Ids, known and pending ones, whose KV no step computes yet; 1 while it decodes."""
        return len(self.keyed.ids) + self.pending - self.planned

    @property
    def reusable_blocks(self) -> int:
        """How many leading blocks it may find computed.

        One id is left to compute, or nothing could be drawn; and so are the positions
        whose logits it needs for the logprobs of its prompt.
        """
        wanted = len(self.keyed.ids) - 1
        if self.scored < self.prompt_tokens - 1:
            wanted = self.scored
        return wanted // self.keyed.block_tokens

    @property
    def goes_on(self) -> bool:
        """Whether a further id is drawn after the pending ones, as far as is known."""
        return self.output_tokens + self.pending < self._max_output

    @property
    def finish(self) -> int:
        """Why the output ends with its last id, or GOES_ON."""
        output = len(self.keyed.ids) - self.prompt_tokens
        if output and output >= self._min_output and self.keyed.ids[-1] in self._ends:
            return STOP_TOKEN
        return LENGTH if output >= self._max_output else GOES_ON

    def banned(self, position: int) -> tuple[int, ...]:
        """Ends that the id at an output position must not be: it would end before min_tokens."""
        return self._banned if position + 1 < self._min_output else ()
