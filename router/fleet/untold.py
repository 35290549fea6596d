"""Whether a replica hides its cache: it reuses blocks of which its feed never told.

Such a feed contradicts nothing, so no digest gives it away. Knows keys and counts proofs; no
tree, no view.
"""

from collections.abc import Iterable

MUTE_DIGESTS = 2  # blocks are reused, and not told of before so many digests: they never will be
UNTOLD_LIMIT = 64


class Untold:
    """What one replica reused and has not told of.

    Attributes:
        mute: Whether it was found out, and has not reused since what it told of.
    """

    def __init__(self) -> None:
        self.mute = False
        self._digests: dict[int, int] = {}  # block -> digests since it was reused

    def reused(self, key: int, *, told: bool) -> None:
        """A block was reused, and was told of or not."""
        if told:
            self.mute = False
        elif len(self._digests) < UNTOLD_LIMIT:
            # It may still come: feeds are behind outputs on the link.
            self._digests.setdefault(key, 0)

    def told(self, keys: Iterable[int]) -> None:
        """It tells of these blocks."""
        if self._digests:
            for key in keys:
                self._digests.pop(key, None)

    def proven(self) -> bool:
        """A proof came, and before it all that there was to tell; return whether it is mute now."""
        self._digests = {key: digests + 1 for key, digests in self._digests.items()}
        if all(digests <= MUTE_DIGESTS for digests in self._digests.values()):
            return False
        self._digests.clear()
        was, self.mute = self.mute, True
        return not was

    def clear(self) -> None:
        """What was known of its cache was dropped."""
        self._digests.clear()
