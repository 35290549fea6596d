"""A file that lists members, as text -> members. Pure; reads no file.

YAML or JSON: a list, or a mapping with the lists `groups`, `tokenizers` and `detokenizers`. An
entry is `HOST:PORT`, `NAME=HOST:PORT`, or a mapping with `address` and, if wanted, `name` and
`draining`.
"""

from reprlib import Repr
from typing import Any, Final

import yaml

from router.discovery.member import Member, is_address, is_name, parse_member

SECTIONS = frozenset({"groups", "tokenizers", "detokenizers"})
_FIELDS = frozenset({"address", "name", "draining"})
# The same loader in C, seven times as fast, where PyYAML was built with it.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What is nested is not written out: with aliases, a short file may name a billion things.
_REPR: Final = Repr()
_REPR.maxlevel = 2
_short: Final = _REPR.repr


def parse_listing(content: bytes, section: str) -> list[Member]:
    """Return what a file lists under a section; a file that is one list has only `groups`.

    Raises:
        ValueError: It is not such a file, or empty: to list nobody it must say `[]`.
    """
    try:
        said = yaml.load(content.decode(), _LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise ValueError(f"neither YAML nor JSON{line}") from None
    members = [_member(entry) for entry in _entries(said, section)]
    if len({member.address for member in members}) < len(members):
        raise ValueError("an address is listed twice")
    return members


def _entries(said: Any, section: str) -> list[Any]:
    if said is None:
        raise ValueError("it is empty; to list nobody it must say []")
    if isinstance(said, dict):
        unknown = said.keys() - SECTIONS
        if unknown:
            raise ValueError(f"unknown: {_short(sorted(map(_short, unknown)))}")
        entries = said.get(section, [])
    else:
        entries = said if section == "groups" else []
        if not isinstance(said, list):
            entries = None
    if not isinstance(entries, list):
        raise ValueError(f"{section} must be a list")  # noqa: TRY004
    return entries


def _member(entry: Any) -> Member:
    if isinstance(entry, str):
        return parse_member(entry)
    if not isinstance(entry, dict) or entry.keys() - _FIELDS:
        raise ValueError(f"{_short(entry)} is neither HOST:PORT nor a mapping with an address")
    address, name, draining = entry.get("address"), entry.get("name", ""), entry.get("draining")
    if not isinstance(address, str) or not is_address(address):
        raise ValueError(f"address {_short(address)} is not HOST:PORT")
    if not isinstance(name, str) or not isinstance(draining, bool | None):
        raise ValueError(f"at {address}: name is text, draining a truth")  # noqa: TRY004
    if not is_name(name):
        raise ValueError(f"at {address}: the name is too long, or no line of text")
    return Member(key=address, address=address, name=name, draining=bool(draining))
