"""A rolling digest of everything that a rank planned and drew. Equal digests: equal ranks.

Pure. Knows plans and results, nothing of who compares.
"""

from array import array

import xxhash

from worker.engine.engine import StepPlan, StepResult
from worker.request import CacheDigest


class PlanDigest:
    """64 bits over all plans, results and cache states so far, in order."""

    def __init__(self) -> None:
        self.value = 0

    def __repr__(self) -> str:
        return f"<PlanDigest {self.value:016x}>"

    def fold_plan(self, plan: StepPlan, cache: CacheDigest) -> int:
        """Take a step's plan and the cache that it stands on; return the digest.

        Of a block table its length and last block are taken: a table only grows, and
        what it swaps follows from the cache.
        """
        numbers = array("Q", (self.value, plan.step, cache.block_count, cache.xor_keys))
        ids = array("I")
        for row in plan.rows:
            numbers.extend(
                (
                    row.request_id,
                    row.start,
                    len(row.ids),
                    len(row.blocks),
                    row.blocks[-1],
                    row.sampled,
                    row.output_position,
                    row.future + 1,
                )
            )
            ids.extend(row.ids)
            if row.history is not None:
                # Its ids were folded when they were computed or drawn.
                numbers.append(len(row.history))
            if row.targets is not None:
                ids.extend(row.targets)
        return self._fold(numbers, ids)

    def fold_inputs(self, raw: bytes) -> None:
        """Take the inputs of a step, encoded: what they ask for shows in no row."""
        self.value = xxhash.xxh3_64_intdigest(raw, self.value)

    def fold_result(self, result: StepResult) -> int:
        """Take the ids that a step drew; return the digest."""
        return self._fold(array("Q", (self.value,)), array("I", result.ids))

    def _fold(self, numbers: "array[int]", ids: "array[int]") -> int:
        self.value = xxhash.xxh3_64_intdigest(ids.tobytes(), xxhash.xxh3_64_intdigest(numbers))
        return self.value
