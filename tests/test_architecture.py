"""The documents tell the truth: paths, the README's map, ARCHITECTURE's tables, import rules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.errors import BY_REASON
from router.edge.openai_errors import STATUS

ROOT = Path(__file__).parent.parent
GENERATED = {
    f"radixmesh/{api}" for api in ("common", "tokenizer", "detokenizer", "worker", "router")
}


def tracked_folders() -> set[str]:
    """Folders with tracked files, two levels deep, without generated code and test subfolders."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    folders: set[str] = set()
    for name in listing:
        parts = Path(name).parent.parts[:2]
        if parts and parts[0] in {"tests", "protos", "bench", "deploy"}:
            parts = parts[:1]
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return folders - GENERATED


def test_the_readme_maps_exactly_the_folders_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    block = text.split("## Where things are")[1].split("```")[1]
    mapped = {line.split()[0].rstrip("/") for line in block.strip().splitlines()}
    assert mapped == tracked_folders()


def test_the_error_table_of_the_architecture_is_the_one_in_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| (.+?) \|$", text, flags=re.MULTILINE)
    assert {row[0]: (row[1], row[2]) for row in rows} == {
        reason: (error.code, error.advice) for reason, error in BY_REASON.items()
    }


def test_the_http_codes_of_the_architecture_are_those_in_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = text.split("\nHTTP: ")[1].split("\n\n")[0]
    pairs = re.findall(r"([A-Z_]+) (\d{3})", listed)
    assert {code: int(status) for code, status in pairs} == STATUS


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_the_paths_that_a_document_names_exist(name: str) -> None:
    named = re.findall(r"`([a-z_]+(?:/[a-z_0-9.]+)+)`", (ROOT / name).read_text())
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_import_rules_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
