"""Streams of ids become exactly the offline decode, as soon as it is certain."""

import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes import tokenizers as fakes
from tests.fakes.tokenizers import byte_ids, id_of
from tokenizer_svc.pieces import Pieces

families = pytest.mark.parametrize("family", fakes.FAMILIES)
with_bytes = pytest.mark.parametrize(
    "family", ["SentencePiece BPE", "SentencePiece BPE without strip", "Unigram with bytes"]
)


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return fakes.FAMILIES[family]()


@cache
def pieces_of(family: str) -> Pieces:
    return Pieces(tokenizer_of(family))


def streamed(pieces: Pieces, chunks: Sequence[Sequence[int]], *, keep_special: bool = False) -> str:
    stream = pieces.open(keep_special=keep_special)
    spans = [span for chunk in chunks for span in stream.feed(chunk)]
    spans += stream.finish()
    return "".join(span.text for span in spans)


@st.composite
def chunked_ids(draw: st.DrawFn) -> list[list[float]]:
    """Fractions of a vocabulary, in chunks."""
    fraction = st.floats(0, 1, exclude_max=True, allow_nan=False)
    return draw(st.lists(st.lists(fraction, max_size=6), max_size=8))


@families
@pytest.mark.parametrize("keep_special", [False, True])
@given(chunks=chunked_ids())
def test_any_ids_in_any_chunks_give_the_offline_decode(
    family: str, keep_special: bool, chunks: list[list[float]]
) -> None:
    tokenizer, pieces = tokenizer_of(family), pieces_of(family)
    # One past the end: an id without a token gives no text.
    ids = [[int(part * (pieces.size + 1)) for part in chunk] for chunk in chunks]
    flat = [token_id for chunk in ids for token_id in chunk]
    expected = tokenizer.decode(flat, skip_special_tokens=not keep_special)
    assert streamed(pieces, ids, keep_special=keep_special) == expected


@with_bytes
@given(raw=st.binary(max_size=12), places=st.lists(st.integers(0, 12), max_size=4))
def test_runs_of_byte_ids_are_text_only_as_a_whole(
    family: str, raw: bytes, places: list[int]
) -> None:
    tokenizer, pieces = tokenizer_of(family), pieces_of(family)
    ids = byte_ids(tokenizer, raw)
    for place in places:  # break the runs with a word here, a special id there
        ids.insert(place, id_of(tokenizer, fakes.SPECIAL if place % 2 else "▁a"))
    assert streamed(pieces, [[token_id] for token_id in ids]) == tokenizer.decode(ids)


@families
@given(text=st.text(max_size=30))
def test_the_ids_of_any_text_stream_as_they_decode(family: str, text: str) -> None:
    tokenizer, pieces = tokenizer_of(family), pieces_of(family)
    ids = tokenizer.encode(text).ids
    assert streamed(pieces, [[token_id] for token_id in ids]) == tokenizer.decode(ids)


@given(text=st.text(max_size=60))
def test_byte_level_text_survives_the_way_there_and_back(text: str) -> None:
    ids = tokenizer_of("byte-level BPE").encode(text).ids
    assert streamed(pieces_of("byte-level BPE"), [[i] for i in ids], keep_special=True) == text


def common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    different = (place for place, char in enumerate(first) if last[place : place + 1] != char)
    return first[: next(different, len(first))]


# What may follow, to find out what is certain: the right end for any unfinished
# character (its next byte may have to be in a certain range), and a wrong one.
PROBES = (
    b"",
    b"\xff",
    *(bytes((byte,)) + b"\x80" * more for byte in (0x80, 0x90, 0xA0) for more in range(3)),
)


@pytest.mark.parametrize(
    "family", ["byte-level BPE", "SentencePiece BPE", "SentencePiece BPE without strip"]
)
@given(raw=st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0x80, 0xFF])))
def test_text_comes_as_soon_as_nothing_that_follows_can_change_it(
    family: str, raw: list[int]
) -> None:
    tokenizer, pieces = tokenizer_of(family), pieces_of(family)
    ids = byte_ids(tokenizer, bytes(raw))
    stream = pieces.open(keep_special=False)
    emitted = "".join(span.text for span in stream.feed(ids))
    word = id_of(tokenizer, "a")
    futures = [[*ids, *byte_ids(tokenizer, probe), word] for probe in PROBES]
    assert emitted == common_start([tokenizer.decode(future) for future in futures])


@pytest.mark.parametrize("family", ["byte-level BPE", "SentencePiece BPE"])
@pytest.mark.parametrize("token", ["invalid", "special"])
def test_ids_that_give_no_text_or_only_replacements_cost_linear_time(
    family: str, token: str
) -> None:
    """B27."""
    tokenizer, pieces = tokenizer_of(family), pieces_of(family)
    token_id = (
        byte_ids(tokenizer, b"\xff")[0] if token == "invalid" else id_of(tokenizer, fakes.SPECIAL)
    )

    def seconds(count: int) -> float:
        stream = pieces.open(keep_special=False)
        start = time.thread_time()
        for _ in range(count):
            stream.feed([token_id])
        stream.finish()
        return time.thread_time() - start

    short = min(seconds(5_000) for _ in range(3))
    long = min(seconds(40_000) for _ in range(3))
    assert long < 8 * short * 3  # eight times the ids; quadratic would be 64 times


@pytest.mark.parametrize("family", ["byte-level BPE", "SentencePiece BPE"])
def test_invalid_bytes_reach_the_client_at_once(family: str) -> None:
    """B27."""
    pieces = pieces_of(family)
    (invalid,) = byte_ids(tokenizer_of(family), b"\xff")
    stream = pieces.open(keep_special=False)
    for _ in range(100):
        assert [span.text for span in stream.feed([invalid])] == ["\ufffd"]


def test_a_character_that_grows_over_ids_is_emitted_once() -> None:
    """B26."""
    tokenizer, pieces = tokenizer_of("byte-level BPE"), pieces_of("byte-level BPE")
    ids = byte_ids(tokenizer, "A世ab".encode())
    stream = pieces.open(keep_special=False)
    texts = ["".join(span.text for span in stream.feed([token_id])) for token_id in ids]
    assert texts == ["A", "", "", "世", "a", "b"]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    tokenizer, pieces = tokenizer_of("byte-level BPE"), pieces_of("byte-level BPE")
    stream = pieces.open(keep_special=False)
    assert stream.feed(byte_ids(tokenizer, "😀".encode()[:3])) == []
    assert stream.settled == 0
    assert [tuple(span) for span in stream.finish()] == [("\ufffd", 0, 3)]
    assert stream.settled == 3


def test_a_span_names_the_ids_that_it_came_from() -> None:
    tokenizer, pieces = tokenizer_of("byte-level BPE"), pieces_of("byte-level BPE")
    stream = pieces.open(keep_special=False)
    special = id_of(tokenizer, fakes.SPECIAL)
    word = tokenizer.encode("a").ids
    spans = stream.feed([*word, special, *byte_ids(tokenizer, "é".encode()), special])
    assert [tuple(span) for span in spans] == [("a", 0, 1), ("é", 2, 4)]
    assert stream.settled == 5


def test_a_run_of_bytes_gives_each_character_to_its_own_ids() -> None:
    tokenizer, pieces = tokenizer_of("SentencePiece BPE"), pieces_of("SentencePiece BPE")
    stream = pieces.open(keep_special=False)
    assert stream.feed(byte_ids(tokenizer, "é!".encode())) == []
    spans = stream.feed([id_of(tokenizer, "▁a")])
    assert [tuple(span) for span in spans] == [("é", 0, 2), ("!", 2, 3), (" a", 3, 4)]


def test_a_decoder_that_cannot_stream_gives_its_text_at_the_end() -> None:
    tokenizer = fakes.bpe_with_suffix()
    pieces = Pieces(tokenizer)
    assert not pieces.streams
    stream = pieces.open(keep_special=False)
    assert stream.feed([1, 2, 3]) == []
    assert "".join(span.text for span in stream.finish()) == tokenizer.decode([1, 2, 3]) == "a bc"


@families
def test_every_family_streams(family: str) -> None:
    assert pieces_of(family).streams


def test_the_bytes_of_an_id_are_exact_even_when_not_utf8() -> None:
    tokenizer, pieces = tokenizer_of("byte-level BPE"), pieces_of("byte-level BPE")
    for byte in (0x00, 0x20, 0x41, 0xE4, 0xFF):
        (token_id,) = byte_ids(tokenizer, bytes((byte,)))
        assert pieces.render(token_id, keep_special=False, first=False) == bytes((byte,))
    tokenizer, pieces = tokenizer_of("SentencePiece BPE"), pieces_of("SentencePiece BPE")
    assert pieces.render(*byte_ids(tokenizer, b"\xe4"), keep_special=False, first=True) == b"\xe4"
    hello = id_of(tokenizer, "▁Hello")
    assert pieces.render(hello, keep_special=False, first=True) == b"Hello"
    assert pieces.render(hello, keep_special=False, first=False) == b" Hello"
    special = id_of(tokenizer, fakes.SPECIAL)
    assert pieces.render(special, keep_special=False, first=False) == b""
    assert pieces.render(special, keep_special=True, first=False) == b"</s>"
