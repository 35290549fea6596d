"""One request inside a replica: its ids, how far they are computed, when it ends. Pure."""

from worker.kvcache.keyed import KeyedIds
from worker.kvcache.radix import Chain
from worker.request import GOES_ON, LENGTH, STOP_TOKEN, Add
from worker.schedule.limits import Limits


class Sequence:
    """A request's state; the same on every rank.

    Attributes:
        keyed: Prompt and output ids with their block keys.
        prompt_tokens: How many of them are the prompt.
        computed: How many leading ids have their KV in `chain`.
        chain: Its blocks while it runs, else None.
        started: Whether it ever ran; it is announced once.
        uncached: Ids to compute as it looked when it was queued.
        order: What goes first: higher priority, then earlier arrival.
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
        self.prompt_tokens = len(add.prompt) // 4
        self.computed = 0
        self.chain: Chain | None = None
        self.started = False
        self.uncached = len(self.keyed)
        self.order = (-add.priority, arrival)
        self.accepted_us = now_us
        self.deadline_us = now_us + add.timeout_ms * 1000 if add.timeout_ms else 0
        self._ends = frozenset(add.sampling.stop_ids) | (
            frozenset() if add.sampling.ignore_eos else limits.eos_ids
        )
        self._banned = tuple(sorted(self._ends))
        self._max_output = min(add.sampling.max_tokens, limits.max_model_len - self.prompt_tokens)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} prompt={self.prompt_tokens} "
            f"output={self.output_tokens} computed={self.computed}>"
        )

    def __len__(self) -> int:
        return len(self.keyed.ids)

    @property
    def output_tokens(self) -> int:
        """Ids after the prompt's end; the position of the next one."""
        return len(self.keyed.ids) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Known ids without KV; 1 while it decodes."""
        return len(self.keyed.ids) - self.computed

    @property
    def banned(self) -> tuple[int, ...]:
        """Ends that the next id must not be: it would end the output before min_tokens."""
        return self._banned if self.output_tokens + 1 < self.sampling.min_tokens else ()

    @property
    def finish(self) -> int:
        """Why the output ends with its last id, or GOES_ON."""
        output = self.output_tokens
        if output and output >= self.sampling.min_tokens and self.keyed.ids[-1] in self._ends:
            return STOP_TOKEN
        return LENGTH if output >= self._max_output else GOES_ON
