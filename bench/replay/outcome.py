"""What a run showed: who was served where and when, and the figures made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.replay.job import Job


@dataclass(slots=True, kw_only=True)
class Served:
    """One request's fate.

    Attributes:
        worker: Where it was sent.
        predicted_blocks: What the router expected to be found there.
        first_s: Seconds from its arrival to the end of its prefill.
        computed: Prompt ids that were computed for it.
    """

    job: Job
    worker: int
    predicted_blocks: int
    first_s: float = 0.0
    computed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole run."""

    block_tokens: int
    served: Sequence[Served]
    busy_s: Sequence[float]
    end_s: float

    @property
    def hit(self) -> float:
        """Share of all prompt ids that were not computed."""
        asked = sum(one.job.tokens for one in self.served)
        return 1 - sum(one.computed for one in self.served) / asked

    @property
    def predicted_hit(self) -> float:
        """Share of all prompt ids that the router expected not to be computed."""
        asked = sum(one.job.tokens for one in self.served)
        return sum(one.predicted_blocks for one in self.served) * self.block_tokens / asked

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return fmean(one.first_s for one in self.served)

    def quantile_s(self, share: float) -> float:
        """Time to first token that `share` of the requests did not exceed."""
        times = sorted(one.first_s for one in self.served)
        return times[min(len(times) - 1, int(share * len(times)))]

    @property
    def imbalance(self) -> float:
        """Time that the busiest worker spent on prefills over the mean of all."""
        mean = fmean(self.busy_s)
        return max(self.busy_s) / mean if mean else 1.0

    @property
    def shared_computed(self) -> float:
        """How often the whole fleet computed what a burst shares: the worst burst's mean.

        0 when nothing is shared by a burst.
        """
        spent: dict[int, float] = {}
        for one in self.served:
            if one.job.shared:
                length = one.job.shared * self.block_tokens
                found = one.job.tokens - one.computed
                name = one.job.keys[one.job.shared - 1]
                spent[name] = spent.get(name, 0.0) + max(0, length - found) / length
        return max(spent.values(), default=0.0)

    def row(self) -> dict[str, float]:
        """Return all figures, for a table or a file."""
        return {
            "hit": round(self.hit, 4),
            "predicted_hit": round(self.predicted_hit, 4),
            "ttft_mean_s": round(self.mean_s, 4),
            "ttft_p50_s": round(self.quantile_s(0.5), 4),
            "ttft_p99_s": round(self.quantile_s(0.99), 4),
            "imbalance": round(self.imbalance, 3),
            "shared_computed": round(self.shared_computed, 2),
        }
