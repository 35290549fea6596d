"""How the ranks of a replica agree on what each of them tried: all could, or it is undone.

Rank (0, 0) hears every rank's answer and tells all the same verdict. Either waits without
a deadline, for a try may take minutes; a rank that ends meanwhile ends the wait. Knows the
carrier; knows not what was tried.
"""

from collections.abc import Callable

import msgspec

from worker.group.carrier import Leaf, Root
from worker.request import Answer

# Tries something on this rank, and on all others alike; returns what all take as outcome.
Together = Callable[[Callable[[], Answer]], Answer]


def alone(attempt: Callable[[], Answer]) -> Answer:
    """Return the verdict of a rank that has no peers: its own answer."""
    return attempt()


def decide(root: Root, own: Answer) -> Answer:
    """Rank (0, 0): return the first refusal, by rank, or the own answer; all are told it.

    Raises:
        PeerLost: A rank ended.
    """
    answers = [own]
    for number, word in enumerate(root.hellos(), 1):
        other = msgspec.msgpack.decode(word, type=Answer)
        named = f"rank {number}: {other.message}"
        answers.append(msgspec.structs.replace(other, message=named))
    verdict = next((answer for answer in answers if answer.reason), own)
    root.broadcast(msgspec.msgpack.encode(verdict))
    return verdict


def abide(leaf: Leaf, own: Answer) -> Answer:
    """Any other rank: tell rank (0, 0), and return its verdict.

    Raises:
        PeerLost: Rank (0, 0) ended.
    """
    leaf.hello(msgspec.msgpack.encode(own))
    return msgspec.msgpack.decode(leaf.receive(), type=Answer)
