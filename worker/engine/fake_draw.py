"""What the fake engine draws from a state, and how likely it says that ids were. Pure.

The ordinary ids form a ring. The state points at one of them, which is the likeliest;
each next one in the ring is e times less likely. Drawn is the first of the ring that is
not banned. A bias of -100 or less bans an id; among ids with 100 or more the state
chooses, whatever else there is; other biases do nothing. Where a penalty is asked for,
the draw is from a state that depends on the penalties, on the ids that they count and
on where the output begins, so wrong ids there change what is drawn. Logprobs and
alternatives are those of the state itself.
"""

import struct
from collections.abc import Sequence
from typing import Final

import xxhash

from worker.engine.engine import Row
from worker.request import Tops

_FORCED: Final = 100.0


class FakeDraw:
    """Draws and scores. A vocabulary that is turned gives other ids.

    Args:
        ordinary: The ring.
        vocab_size: Ids run from 0 to this, exclusive.
        eos_ids: What ends an output.
        eos_after: An output ends by itself after so many ids; 0 means never.
    """

    def __init__(
        self, ordinary: Sequence[int], *, vocab_size: int, eos_ids: Sequence[int], eos_after: int
    ) -> None:
        self._ring = ordinary
        self._places = {token_id: place for place, token_id in enumerate(ordinary)}
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._eos_after = eos_after

    def __repr__(self) -> str:
        return f"<FakeDraw of {len(self._ring)} ids>"

    def draw(self, row: Row, state: int) -> int:
        """Return the id that follows."""
        banned: Sequence[int] = row.banned
        if row.history is not None:
            state = _penalized(row, state)
        if row.sampling.logit_bias:
            forced, barred = _biased(row)
            if forced:
                return forced[state % len(forced)]
            banned = (*banned, *barred)
        if 0 < self._eos_after <= row.output_position and not row.sampling.ignore_eos:
            ends = [end for end in self._eos_ids if end not in banned]
            if ends:
                return ends[0]
        return self._first(state, banned)

    def _first(self, state: int, banned: Sequence[int]) -> int:
        count = len(self._ring)
        for step in range(count):
            candidate = self._ring[(state + step) % count]
            if candidate not in banned:
                return candidate
        everything = range(self._vocab_size)
        # Where a ban leaves nothing, it cannot be kept.
        return next((one for one in everything if one not in banned), self._ring[state % count])

    def logprob(self, state: int, token_id: int) -> float:
        """Return how likely an id was after a state; the rest of the vocabulary is unlikeliest."""
        count = len(self._ring)
        place = self._places.get(token_id)
        far = count if place is None else (place - state) % count
        return -(state % 1000) / 1000 - far

    def tops(self, states: Sequence[int], asked: Sequence[int]) -> Tops:
        """Return the likeliest ids after each state, as many as asked for; no counts if none."""
        if not any(asked):
            return Tops()
        tops = Tops([], [], [])
        ring = self._ring
        for state, wanted in zip(states, asked, strict=True):
            count = min(wanted, len(ring))
            tops.counts.append(count)
            tops.ids.extend(ring[(state + far) % len(ring)] for far in range(count))
            tops.logprobs.extend(-(state % 1000) / 1000 - far for far in range(count))
        return tops


def _penalized(row: Row, state: int) -> int:
    sampling, history = row.sampling, row.history
    assert history is not None
    asked = struct.pack(
        "<dddI",
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        row.prompt_tokens,
    )
    ids = struct.pack(f"<{len(history)}I", *history)
    return xxhash.xxh3_64_intdigest(asked + ids, state)


def _biased(row: Row) -> tuple[list[int], list[int]]:
    """Return the ids that are forced, in rising order, and those that are banned."""
    biases = row.sampling.biases.items()
    forced = [one for one, bias in biases if bias >= _FORCED and one not in row.banned]
    return sorted(forced), [one for one, bias in biases if bias <= -_FORCED]
