"""What one replica takes, put together from its configuration and its engine."""

from dataclasses import dataclass

from worker.config import RankConfig
from worker.engine.engine import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a replica; every rank of it has the same ones.

    Attributes:
        max_model_len: Prompt and output ids of one request. Never more than the KV cache
            holds, so the last running request can always go on to its end.
        max_running: Requests in one step; never more than `max_batched_tokens`, so
            decoding cannot starve a prefill.
        max_waiting: Requests queued beyond those.
        max_batched_tokens: Ids computed in one step.
        prefix_first: Whether the longest cached prefix goes first, and not the first comer.
        ageing_us: Who has waited so long goes before all who have not.
    """

    max_model_len: int
    max_running: int
    max_waiting: int
    max_batched_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    prefix_first: bool = True
    ageing_us: int = 1_000_000

    @classmethod
    def of(cls, config: RankConfig, info: EngineInfo) -> "Limits":
        """Return the limits of a replica."""
        wanted = config.max_model_len or info.max_model_len
        return cls(
            max_model_len=min(wanted, info.max_model_len, info.kv_blocks * info.block_tokens),
            max_running=max(1, min(config.max_running, config.max_batched_tokens)),
            max_waiting=config.max_waiting,
            max_batched_tokens=max(1, config.max_batched_tokens),
            vocab_size=info.vocab_size,
            eos_ids=frozenset(info.eos_ids),
            prefix_first=config.order == "lpm",
            ageing_us=config.ageing_ms * 1000,
        )
