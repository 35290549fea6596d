"""Stop strings: the earliest match wins, and no more text waits than must."""

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.errors import InvalidRequest
from tokenizer_svc.detokenize.stops import StopMatcher, check_stops

stops_lists = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5)
# Each item is the text of one id; many give none.
id_texts = st.lists(st.text("abcd", max_size=4), max_size=20)

Found = tuple[int, int]  # begin and end


def naive_match(text: str, places: Sequence[int], stops: Sequence[str], least: int) -> Found | None:
    """The leftmost, then longest stop that is completed by id number `least` or later."""
    for start in range(len(text)):
        for stop in sorted(stops, key=len, reverse=True):
            end = start + len(stop)
            if text.startswith(stop, start) and places[end - 1] >= least:
                return start, end
    return None


def may_grow(text: str, start: int, stops: Sequence[str]) -> bool:
    rest = text[start:]
    return any(len(stop) > len(rest) and stop.startswith(rest) for stop in stops)


def naive_state(
    text: str, places: Sequence[int], stops: Sequence[str], least: int
) -> tuple[int, Found | None]:
    """How much passes, and the match if nothing that follows can change it."""
    found = naive_match(text, places, stops, least)
    growing = [start for start in range(len(text)) if may_grow(text, start, stops)]
    if found and not any(start <= found[0] for start in growing):
        return found[0], found
    starts = [*growing, *([found[0]] if found else [])]
    return min(starts, default=len(text)), None


@given(parts=id_texts, stops=stops_lists, least=st.integers(0, 6))
def test_after_every_id_just_that_text_is_held_that_may_still_become_a_stop(
    parts: list[str], stops: list[str], least: int
) -> None:
    """B29, against a matcher that looks at everything every time."""
    matcher = StopMatcher(stops, min_ids=least)
    text, passed = "", ""
    places: list[int] = []
    for number, part in enumerate(parts, start=1):
        text += part
        places += [number] * len(part)
        passed += matcher.feed(part, number)
        expected, found = naive_state(text, places, stops, least)
        if found:
            assert matcher.match == (text[slice(*found)], *found, places[found[1] - 1])
            assert passed == text[: found[0]]
            assert matcher.feed("more", number + 1) == matcher.finish() == ""
            return
        assert matcher.match is None
        assert passed == text[:expected]
    passed += matcher.finish()
    found = naive_match(text, places, stops, least)
    assert passed == (text[: found[0]] if found else text)
    assert (matcher.match and (matcher.match.start, matcher.match.end)) == found


@given(text=st.text("ab", max_size=30), stops=stops_lists, cuts=st.lists(st.integers(0, 30)))
def test_the_match_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    whole, cut = StopMatcher(stops, include=True), StopMatcher(stops, include=True)
    expected = whole.feed(text, 1) + whole.finish()
    borders = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    passed = "".join([cut.feed(piece, 1) for piece in pieces]) + cut.finish()
    assert (passed, cut.match) == (expected, whole.match)


def passes(matcher: StopMatcher, *parts: str) -> list[str]:
    return [matcher.feed(part, number) for number, part in enumerate(parts, start=1)]


def test_a_stop_that_is_split_over_ids_never_leaks() -> None:
    """B29."""
    matcher = StopMatcher(["own fox"])
    assert passes(matcher, "quick br", "own", " fox", " jumps") == ["quick br", "", "", ""]
    assert matcher.match == ("own fox", 8, 15, 3)


def test_what_is_no_stop_after_all_passes_at_once() -> None:
    matcher = StopMatcher(["own fox"])
    assert passes(matcher, "br", "own", " f", "rog own", "er") == [
        "br",
        "",
        "",
        "own frog ",
        "owner",
    ]


def test_of_stops_that_begin_at_one_place_the_longest_wins_even_if_it_comes_later() -> None:
    matcher = StopMatcher(["ab", "abcd"])
    assert passes(matcher, "xab") == ["x"]
    assert matcher.match is None
    matcher.feed("cd", 2)
    assert matcher.match == ("abcd", 1, 5, 2)


def test_a_shorter_stop_counts_when_the_longer_one_fails() -> None:
    matcher = StopMatcher(["ab", "abcd"])
    assert passes(matcher, "xab", "cx") == ["x", ""]
    assert matcher.match == ("ab", 1, 3, 1)


def test_a_shorter_stop_counts_when_the_text_ends() -> None:
    matcher = StopMatcher(["ab", "abcd"])
    assert passes(matcher, "xabc") == ["x"]
    assert matcher.finish() == ""
    assert matcher.match == ("ab", 1, 3, 1)


def test_a_stop_that_begins_earlier_beats_one_that_ends_earlier() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert passes(matcher, "abc", "d") == ["", ""]
    assert matcher.match == ("abcd", 0, 4, 2)


def test_the_stop_is_kept_on_demand() -> None:
    matcher = StopMatcher(["\n\n"], include=True)
    assert passes(matcher, "one\n", "\ntwo") == ["one", "\n\n"]
    assert matcher.match == ("\n\n", 3, 5, 2)


def test_stops_that_too_few_ids_complete_pass_as_text() -> None:
    matcher = StopMatcher(["."], min_ids=3)
    assert passes(matcher, "a.", "b.", "c.") == ["a.", "b.", "c"]
    assert matcher.match == (".", 5, 6, 3)


def test_a_stop_is_found_among_characters_outside_the_basic_plane() -> None:
    matcher = StopMatcher(["👩\u200d👧"])
    assert passes(matcher, "👩", "\u200d", "👩\u200d", "👧") == ["", "", "👩\u200d", ""]
    assert matcher.match == ("👩\u200d👧", 2, 5, 4)


@pytest.mark.parametrize("stops", [["a" * 4096], ["a" * 2000 + "b", "a" * 2001 + "c"]])
def test_hostile_text_costs_linear_time(stops: list[str]) -> None:
    def seconds(count: int) -> float:
        matcher = StopMatcher(stops)
        start = time.thread_time()
        for number in range(count // 100):
            matcher.feed("a" * 99 + "d", number)
        return time.thread_time() - start

    short = min(seconds(10_000) for _ in range(3))
    long = min(seconds(80_000) for _ in range(3))
    assert long < 8 * short * 3


@pytest.mark.parametrize(
    ("stops", "limit"), [(["a"] * 65, "64"), (["é" * 2049], "4096"), (["x", ""], "")]
)
def test_stops_beyond_the_limits_are_refused(stops: list[str], limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_stops(stops)
    assert caught.value.field == "stop"
    assert caught.value.metadata.get("limit", "") == limit


def test_stops_at_the_limits_are_taken() -> None:
    check_stops([chr(ord("a") + place % 26) * 4096 for place in range(64)])
