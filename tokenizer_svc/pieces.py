"""What each id of a tokenizer is worth. Knows tokenizers' decoders; knows no outputs or stops.

A decoder turns a list of tokens into text. Those in use do it token by token
(Metaspace, WordPiece, Replace, none at all), byte by byte (ByteLevel), or mix
both (ByteFallback), and may then cut the start of the whole text (Strip). Each
token is therefore shown to the decoder once, after a neutral one, and its part
is remembered. Whatever works otherwise (CTC, the old BPE suffix) is decoded at
the end of the output, and so is a decoder that fails the rehearsal.
"""

import json
import logging
import random
import re
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

from tokenizers import Tokenizer, decoders

from tokenizer_svc.guard import guarded
from tokenizer_svc.incremental import (
    ByteStream,
    HeldStream,
    Piece,
    PieceStream,
    TextStream,
)

logger = logging.getLogger(__name__)

ANCHOR: Final = "a"
# As ByteFallback reads it: Rust's hexadecimal takes a plus sign too.
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
REHEARSALS: Final = 64
REHEARSAL_IDS: Final = 24

Stage = dict[str, Any]


class Pieces:
    """The ids of one tokenizer, as text and bytes. `size`: ids are below it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self.size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        stages = _stages(tokenizer)
        self._byte_level = [stage["type"] for stage in stages] == ["ByteLevel"]
        self._lead, self._lead_count = _pop_lead(stages)
        self._raws = {keep: _Raws(tokenizer, self._left_out(keep)) for keep in (False, True)}
        shown = _Shown(stages)
        self._pieces = {
            keep: _PieceTable(tokenizer, shown, self._left_out(keep)) for keep in (False, True)
        }
        self.streams = self._byte_level or _is_piecewise(stages)
        if self.streams and not self._rehearse(shown.has_bytes):
            self.streams = False
        if not self.streams:
            logger.warning("decoder does not stream", extra={"decoder": str(tokenizer.decoder)})

    def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """Return the offline decode, which defines what is exact; ids with no token are left out.

        Raises:
            InternalError: The tokenizer's decoder failed.
        """
        with guarded("decode"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=not keep_special))

    def open(self, *, keep_special: bool) -> TextStream:
        """Begin the text of an output."""
        if not self.streams:
            return HeldStream(lambda ids: self.decode(ids, keep_special=keep_special))
        if self._byte_level:
            return ByteStream(self._raws[keep_special].__getitem__)
        return PieceStream(
            self._pieces[keep_special].__getitem__, lead=self._lead, lead_count=self._lead_count
        )

    def render(self, token_id: int, *, keep_special: bool, first: bool) -> bytes:
        """Return the bytes of one id by itself; not always UTF-8, empty when it is left out.

        Args:
            token_id: The id.
            keep_special: Render special ids too.
            first: It begins an output, so a space that decoding drops there is dropped.
        """
        if self._byte_level:
            return self._raws[keep_special][token_id]
        piece = self._pieces[keep_special][token_id]
        if piece is None:
            return b""
        if piece.byte is not None:
            return bytes((piece.byte,))
        if not first:
            return piece.rest.encode()
        lead = self._lead * self._lead_count
        return piece.first.removeprefix(lead).encode()

    def _left_out(self, keep_special: bool) -> Container[int]:
        return () if keep_special else self._special

    def _rehearse(self, has_bytes: bool) -> bool:
        """Whether streams equal the offline decode on some arbitrary ids."""
        rng = random.Random(0)
        pools = [range(self.size), sorted(self._special) or range(self.size)]
        if has_bytes:
            found = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
            pools.append([token_id for token_id in found if token_id is not None] or pools[0])
        for _ in range(REHEARSALS if self.size else 0):
            ids = [rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, REHEARSAL_IDS))]
            if not (self._is_exact(ids, keep=False) and self._is_exact(ids, keep=True)):
                return False
        return True

    def _is_exact(self, ids: list[int], *, keep: bool) -> bool:
        stream = self.open(keep_special=keep)
        text = "".join(span.text for span in [*stream.feed(ids), *stream.finish()])
        return text == self.decode(ids, keep_special=keep)


class _Raws(dict[int, bytes]):
    """Bytes of each id of a byte-level vocabulary; filled when asked."""

    def __init__(self, tokenizer: Tokenizer, left_out: Container[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._left_out = left_out

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._left_out else self._tokenizer.id_to_token(token_id)
        raw = self[token_id] = b"" if token is None else _byte_level_bytes(token)
        return raw


class _PieceTable(dict[int, Piece | None]):
    """Piece of each id of any other vocabulary; filled when asked."""

    def __init__(self, tokenizer: Tokenizer, shown: "_Shown", left_out: Container[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._shown = shown
        self._left_out = left_out

    def __missing__(self, token_id: int) -> Piece | None:
        token = None if token_id in self._left_out else self._tokenizer.id_to_token(token_id)
        piece = self[token_id] = None if token is None else self._shown.piece(token)
        return piece


class _Shown:
    """Single tokens, shown to a chain of decoder stages."""

    def __init__(self, stages: list[Stage]) -> None:
        self._decode = _chain(stages)
        self._anchor = self._decode([ANCHOR])
        self.has_bytes = any(stage["type"] == "ByteFallback" for stage in stages)

    def piece(self, token: str) -> Piece:
        """Return what a token is worth."""
        byte = BYTE_TOKEN.fullmatch(token) if self.has_bytes else None
        with guarded("decode"):
            return Piece(
                first=self._decode([token]),
                rest=self._decode([ANCHOR, token])[len(self._anchor) :],
                byte=int(byte[1], 16) if byte else None,
            )


def _stages(tokenizer: Tokenizer) -> list[Stage]:
    """Return the decoder's stages, nested sequences laid flat; none without a decoder."""
    decoder = tokenizer.decoder
    return [] if decoder is None else _flat(json.loads(decoder.__getstate__()))


def _flat(stage: Stage) -> list[Stage]:
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in _flat(part)]


def _chain(stages: list[Stage]) -> Callable[[list[str]], str]:
    """Return the stages as one function; without any, tokens are joined by spaces."""
    if not stages:
        return " ".join
    chain = decoders.Sequence([])
    chain.__setstate__(json.dumps({"type": "Sequence", "decoders": stages}).encode())
    return chain.decode


def _pop_lead(stages: list[Stage]) -> tuple[str, int]:
    """Take a Strip of the whole text off the end; returns its character and how many."""
    types = [stage["type"] for stage in stages]
    if len(types) > 1 and types[-1] == "Strip" and "Fuse" in types and not stages[-1]["stop"]:
        strip = stages.pop()
        return strip["content"], strip["start"]
    return "", 0


def _is_piecewise(stages: list[Stage]) -> bool:
    """Whether each token's part depends on nothing but being the first or in a run of bytes."""
    allowed = {"Replace", "Metaspace", "WordPiece", "Strip", "ByteFallback", "Fuse"}
    for stage in stages:
        if stage["type"] not in allowed:
            return False
        if stage["type"] in {"ByteFallback", "Fuse"}:
            allowed = {"Fuse"}  # later stages would see more than a token
    return True


def _byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of byte-level tokens, as GPT-2 laid it down."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET: Final = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token that was written as plain text
        return token.encode()
