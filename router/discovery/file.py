"""A watched file as a source. Reads; what it means says `listing.py`.

The file is read again and again instead of being watched by the system: that also sees what a
mounted ConfigMap, a network file system and an editor do, and a small file costs nothing.
"""

import asyncio
import logging
from pathlib import Path

from router.discovery.listing import parse_listing
from router.discovery.member import Member, Publish

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class FileSource:
    """Lists what a file lists.

    A change counts when two readings in a row agree: a file that is being rewritten in place is
    not taken half-written. What is broken or empty is warned of once, and the last list stands.

    Args:
        path: The file.
        section: Which part of it: `groups`, `tokenizers` or `detokenizers`.
        interval_s: Seconds between two readings; None: INTERVAL_S.
    """

    def __init__(self, path: Path, section: str, *, interval_s: float | None = None) -> None:
        self.name = f"file {path}"
        self._path = path
        self._section = section
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._taken: bytes | None = None  # what was read and dealt with
        self._last: bytes | None = None
        self._readable = True

    async def run(self, publish: Publish) -> None:
        """Publish the file's members now and after each change."""
        while True:
            try:
                content = await asyncio.to_thread(self._path.read_bytes)
            except OSError as error:
                self._last = None
                self._warn(error)
            else:
                self._readable = True
                # A list of thousands takes so long that streams would notice.
                members = await asyncio.to_thread(self.look, content)
                if members is not None:
                    publish(members)
            await asyncio.sleep(self._interval_s)

    def look(self, content: bytes) -> list[Member] | None:
        """Take a reading; return what it lists if it is new, whole and makes sense."""
        return self._parse(content) if self._is_news(content) else None

    def _is_news(self, content: bytes) -> bool:
        """Whether a reading is another one than was taken last, and whole; takes it then."""
        steady = content == self._last or self._taken is None
        self._last = content
        if content == self._taken or not steady:
            return False
        self._taken = content
        return True

    def _parse(self, content: bytes) -> list[Member] | None:
        """Return what a reading lists; None, with a warning, where it makes no sense."""
        try:
            return parse_listing(content, self._section)
        except ValueError as error:
            logger.warning(
                "the list stays as it was", extra={"source": self.name, "error": str(error)}
            )
            return None

    def _warn(self, error: OSError) -> None:
        if self._readable:
            logger.warning("can't be read", extra={"source": self.name, "error": error.strerror})
        self._readable = False
