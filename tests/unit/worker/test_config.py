"""What a rank is told: every field is explained, and is something that ranks look at."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

import worker
from worker.config import FakeConfig, RankConfig

SOURCES = Path(worker.__file__).parent


def attributes_read() -> set[str]:
    """Names of all attributes that code of the worker reads, outside of the class itself."""
    files = [path for path in SOURCES.rglob("*.py") if path.name != "config.py"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("kind", [RankConfig, FakeConfig])
def test_every_field_is_explained_and_read(kind: type[msgspec.Struct]) -> None:
    fields = set(kind.__struct_fields__)
    text = kind.__doc__ or ""
    assert {field for field in fields if not re.search(rf"\b{field}:", text)} == set()
    assert fields - attributes_read() == set()
