"""A conversation in the terminal: reads turns, streams answers. Knows the client, not the console.

What is written and where turns come from is given, so it runs without a terminal too.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from radixmesh.cli.show import footer
from radixmesh.client import Chunk, Client, Message, Options

__all__ = ["Chat", "Writer", "write_answer"]

_LEAVE = frozenset({"/exit", "/quit"})
_RESET = "/reset"


@dataclass(frozen=True, slots=True)
class Writer:
    """Where words go: `text` as they come, `note` for remarks of ours on a line of their own."""

    text: Callable[[str], None]
    note: Callable[[str], None]


@dataclass(slots=True)
class Chat:
    """A conversation; every turn sends all earlier ones again, which the mesh has in its caches."""

    client: Client
    options: Options
    writer: Writer
    history: list[Message] = field(default_factory=list)

    def run(self, turns: Iterator[str]) -> None:
        """Answer turns until they end or one says `/exit`; `/reset` forgets the conversation.

        Raises:
            MeshError: A request failed.
        """
        for turn in turns:
            said = turn.strip()
            if said in _LEAVE:
                return
            if said == _RESET:
                self.history.clear()
                self.writer.note("forgotten")
            elif said:
                self.answer(said)

    def answer(self, said: str) -> None:
        """Answer one turn and remember both. Ctrl-C stops the answer, not the conversation.

        Raises:
            MeshError: The request failed; the turn is not remembered.
        """
        asked = [*self.history, Message("user", said)]
        # Closed here, not by the collector: that is what cancels a request.
        with closing(self.client.generate(asked, **self.options)) as chunks:
            try:
                text = write_answer(chunks, self.writer)
            except KeyboardInterrupt:
                self.writer.text("\n")
                self.writer.note("stopped; this turn is forgotten")
                return
        self.history = [*asked, Message("assistant", text)]


def write_answer(chunks: Iterator[Chunk], writer: Writer) -> str:
    """Write one output as it comes; return its text."""
    parts = []
    for chunk in chunks:
        writer.text(chunk.text)
        parts.append(chunk.text)
        if chunk.finish is not None:
            writer.text("\n")
            writer.note(footer(chunk.finish.usage, chunk.finish.receipt))
    return "".join(parts)
