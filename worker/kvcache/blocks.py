"""The free list of KV blocks. Knows numbers 0..n-1; not what a block holds or who has it."""

from collections.abc import Iterable


class BlockPool:
    """Blocks that nobody holds. The same calls give the same blocks on every rank."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool has at least one block, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<BlockPool {len(self._free)} of {self.total} free>"

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks out. The caller has checked that there are enough."""
        assert count <= len(self._free), "took more blocks than are free"
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Put blocks back."""
        self._free.extend(blocks)
        assert len(self._free) <= self.total, "gave back a block twice"
