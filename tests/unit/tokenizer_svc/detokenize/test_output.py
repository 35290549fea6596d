"""One output: positions, stops across ids, what the ids that count are, single ids as bytes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.errors import InternalError, InvalidRequest, MeshError, UnknownToken
from tests.fakes import tokenizers as fakes
from tests.fakes.tokenizers import byte_ids, id_of
from tokenizer_svc.detokenize.output import Output, OutputOptions, Progress
from tokenizer_svc.pieces import Pieces

TOKENIZER = fakes.byte_level()
PIECES = Pieces(TOKENIZER)
LETTERS = byte_ids(TOKENIZER, "ab世".encode())
SPECIAL = id_of(TOKENIZER, fakes.SPECIAL)

outputs = st.lists(st.lists(st.sampled_from([*LETTERS, SPECIAL]), max_size=4), max_size=8)
stop_lists = st.lists(st.text("ab世", min_size=1, max_size=3), max_size=3)


def run(options: OutputOptions, chunks: Sequence[Sequence[int]]) -> list[Progress]:
    """All that an output says, until it is done."""
    output = Output(PIECES, options)
    said = []
    position = 0
    for chunk in chunks:
        said.append(output.feed(position, chunk))
        position += len(chunk)
        if said[-1].stop:
            return said
    return [*said, output.finish()]


def text_of(said: Sequence[Progress]) -> str:
    return "".join(step.text for step in said)


@given(chunks=outputs, stops=stop_lists, least=st.integers(0, 5), include=st.booleans())
def test_text_stop_and_count_follow_from_the_ids_alone(
    chunks: list[list[int]], stops: list[str], least: int, include: bool
) -> None:
    options = OutputOptions(stops=stops, min_tokens=least, include_stop=include, render=True)
    said = run(options, chunks)
    one_by_one = run(options, [[token_id] for chunk in chunks for token_id in chunk])
    assert text_of(said) == text_of(one_by_one)
    assert said[-1][1:2] + said[-1][4:] == one_by_one[-1][1:2] + one_by_one[-1][4:]
    assert [raw for step in said for raw in step.rendered] == [
        raw for step in one_by_one for raw in step.rendered
    ]


@given(chunks=outputs)
def test_without_stops_the_text_is_the_decode_and_all_ids_count(chunks: list[list[int]]) -> None:
    ids = [token_id for chunk in chunks for token_id in chunk]
    said = run(OutputOptions(), chunks)
    assert text_of(said) == TOKENIZER.decode(ids)
    assert (said[-1].consumed, said[-1].stop) == (len(ids), "")


@given(chunks=outputs, stops=stop_lists, least=st.integers(0, 5))
def test_ids_count_as_consumed_when_their_text_is_out(
    chunks: list[list[int]], stops: list[str], least: int
) -> None:
    ids = [token_id for chunk in chunks for token_id in chunk]
    said = run(OutputOptions(stops=stops, min_tokens=least), chunks)
    text, consumed = "", 0
    for step in said:
        text += step.text
        assert step.fresh == step.consumed - consumed >= 0
        consumed = step.consumed
        if not step.stop:
            out = TOKENIZER.decode(ids[:consumed]).rstrip("\ufffd")
            assert text.startswith(out)
    if said[-1].stop:
        # The id that completes the stop is the first one up to which the text holds it.
        holders = [
            count
            for count in range(least, len(ids) + 1)
            if TOKENIZER.decode(ids[:count]).startswith(text + said[-1].stop)
        ]
        assert consumed == max(holders[0], 1)


@given(chunks=outputs, stops=stop_lists)
def test_rendered_ids_join_to_the_text(chunks: list[list[int]], stops: list[str]) -> None:
    said = run(OutputOptions(stops=stops, include_stop=True, render=True), chunks)
    raws = [raw for step in said for raw in step.rendered]
    assert len(raws) == said[-1].consumed
    assert all(len(step.rendered) == step.fresh for step in said)
    assert b"".join(raws).decode(errors="replace").startswith(text_of(said))


def test_only_the_ids_through_the_one_that_completes_a_stop_count() -> None:
    ids = TOKENIZER.encode("The quick brown fox").ids
    said = run(OutputOptions(stops=["own f"]), [[*ids, *ids]])
    assert text_of(said) == "The quick br"
    assert said[-1].stop == "own f"
    inside = TOKENIZER.decode(ids[: said[-1].consumed])
    assert inside.startswith("The quick brown f")
    assert not TOKENIZER.decode(ids[: said[-1].consumed - 1]).startswith("The quick brown f")


def test_a_special_id_crossing_the_window_of_a_stop_is_neither_cut_nor_delayed() -> None:
    """B29."""
    tool = id_of(TOKENIZER, fakes.ADDED)
    letters = byte_ids(TOKENIZER, b"ab")
    output = Output(PIECES, OutputOptions(stops=["abX"], keep_special=True))
    said = [output.feed(place, [i]) for place, i in enumerate([*letters, tool, SPECIAL])]
    assert [step.text for step in said] == ["", "", "ab<tool call>", "</s>"]


def test_ids_without_text_are_consumed_at_once_unless_text_before_them_is_held() -> None:
    letters = byte_ids(TOKENIZER, b"ab")
    output = Output(PIECES, OutputOptions(stops=["ax"]))
    ids = [SPECIAL, letters[0], SPECIAL, letters[1]]
    said = [output.feed(place, [token_id]) for place, token_id in enumerate(ids)]
    assert [(step.text, step.consumed) for step in said] == [("", 1), ("", 1), ("", 1), ("ab", 4)]


def test_ids_that_share_a_character_count_when_it_is_whole() -> None:
    a, first, second, third = byte_ids(TOKENIZER, "a世".encode())
    output = Output(PIECES, OutputOptions())
    assert output.feed(0, [a, first])[:2] == ("a", 1)
    assert output.feed(2, [second])[:2] == ("", 1)
    assert output.feed(3, [third])[:2] == ("世", 4)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_gap_or_a_repeat_in_the_positions_is_refused(position: int) -> None:
    output = Output(PIECES, OutputOptions())
    output.feed(0, LETTERS[:2])
    with pytest.raises(InvalidRequest) as caught:
        output.feed(position, LETTERS[:1])
    assert caught.value.reason == "INVALID_REQUEST"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    output = Output(PIECES, OutputOptions())
    output.feed(0, [PIECES.size - 1])
    with pytest.raises(UnknownToken):
        output.feed(1, [PIECES.size])


def test_a_panic_of_the_library_is_a_typed_error() -> None:
    """P36, B57: nothing is dropped silently and no process dies."""
    output = Output(Pieces(fakes.broken_decoder()), OutputOptions())
    with pytest.raises(MeshError) as caught:
        output.finish()
    assert isinstance(caught.value, InternalError)
