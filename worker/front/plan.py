"""What a group is to be, and what it is once a rank has said what it can do. Data only."""

from dataclasses import dataclass

from worker.front.ask import GroupInfo
from worker.front.probes import ProbePace
from worker.request import Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What is known of a group before any rank is ready."""

    model: str
    weight_version: str
    fingerprint: str
    engine: str
    dp: int
    pp: int
    tp: int
    max_running: int
    max_waiting: int
    max_batched_tokens: int
    dispatch: str
    probes: ProbePace

    def info(self, ready: Ready) -> GroupInfo:
        """Return the group's description, given what a rank reported."""
        return GroupInfo(
            model=self.model,
            weight_version=self.weight_version,
            fingerprint=self.fingerprint,
            engine=self.engine,
            dp=self.dp,
            pp=self.pp,
            tp=self.tp,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_batched_tokens=self.max_batched_tokens,
            block_tokens=ready.block_tokens,
            kv_blocks=ready.kv_blocks,
            max_model_len=min(ready.max_model_len, ready.kv_blocks * ready.block_tokens),
            vocab_size=ready.vocab_size,
            eos_ids=ready.eos_ids,
        )
