"""A file that lists members: what it may say, and what it may not take away."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from router.discovery.file import FileSource
from router.discovery.listing import parse_listing
from router.discovery.member import Member


def addresses(members: Sequence[Member]) -> list[str]:
    return [member.address for member in members]


def test_a_list_names_groups_in_three_ways() -> None:
    content = b"- h:1\n- a=h:2\n- {address: '[::1]:3', name: b, draining: true}\n"
    assert parse_listing(content, "groups") == [
        Member(key="h:1", address="h:1"),
        Member(key="h:2", address="h:2", name="a"),
        Member(key="[::1]:3", address="[::1]:3", name="b", draining=True),
    ]


def test_json_and_sections_name_text_services_too() -> None:
    content = b'{"groups": ["h:1"], "tokenizers": ["h:2"]}'
    assert addresses(parse_listing(content, "groups")) == ["h:1"]
    assert addresses(parse_listing(content, "tokenizers")) == ["h:2"]
    assert parse_listing(content, "detokenizers") == []
    assert parse_listing(b"[h:1]", "tokenizers") == []


@pytest.mark.parametrize("content", [b"[]", b"groups: []", b"{}"])
def test_nobody_must_be_said(content: bytes) -> None:
    assert parse_listing(content, "groups") == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  \n# a comment\n",
        b"h:1",
        b"5",
        b"- h:1\n- [",
        b"\xff\xfe",
        b"- h",
        b"- h:0",
        b"- h:70000",
        b"- ::1:5",
        b"- 5",
        b"- [h:1]",
        b"- {name: a}",
        b"- {address: h:1, port: 2}",
        b"- {address: h:1, draining: [1]}",
        b"- {address: h:1, name: 4}",
        b"- h:1\n- a=h:1\n",
        b"- unix:/run/x:1",
        b"- a b:1",
        b'- "\\uD800:1"',
        b'- {address: h:1, name: "a\\nb"}',
        b'- {address: h:1, name: "\\uD800"}',
        b"[" * 100_000,
        b"workers: [h:1]",
        b"groups: h:1",
        b"groups:",
    ],
)
def test_anything_else_is_refused_with_a_reason(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_listing(content, "groups")


def test_what_a_file_repeats_is_not_written_out() -> None:
    names = "abcdefgh"
    nested = ", ".join(
        f"&{name} [{', '.join([f'*{before}'] * 9)}]" if before else f"&{name} [1]"
        for before, name in zip(("", *names), names, strict=False)
    )
    content = f"- [{nested}]".encode()
    with pytest.raises(ValueError, match="is neither") as caught:
        parse_listing(content, "groups")
    assert len(str(caught.value)) < 10_000


def looks(*readings: bytes) -> list[list[str]]:
    """What a source publishes when a file reads like this, one after the other."""
    source = FileSource(Path("members.yaml"), "groups")
    found = [source.look(content) for content in readings]
    return [addresses(members) for members in found if members is not None]


def test_the_first_reading_counts_at_once_and_a_change_when_it_stands_still() -> None:
    assert looks(b"[h:1]") == [["h:1"]]
    assert looks(b"[h:1]", b"[h:2]") == [["h:1"]]
    assert looks(b"[h:1]", b"[h:2]", b"[h:2]", b"[h:2]") == [["h:1"], ["h:2"]]


def test_a_file_that_is_being_written_is_not_taken_half_written() -> None:
    whole = b"- h:1\n- h:2\n- h:3\n"
    grown = whole + b"- h:4\n"
    assert looks(whole, b"", b"- h:1\n", grown, grown) == [
        ["h:1", "h:2", "h:3"],
        ["h:1", "h:2", "h:3", "h:4"],
    ]


@pytest.mark.parametrize("broken", [b"", b"- [", b"- h"])
def test_a_broken_file_keeps_the_last_list_and_warns_once(
    broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good = b"[h:1]"
    assert looks(good, broken, broken, broken) == [["h:1"]]
    assert [record.message for record in caplog.records] == ["the list stays as it was"]
    assert looks(good, broken, broken, b"[h:2]", b"[h:2]") == [["h:1"], ["h:2"]]
