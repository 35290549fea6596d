"""Compiling when needed: once for all, kept, and a typed refusal where it cannot be."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.parallel import native
from worker.parallel.segment import Unavailable

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RADIXMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


def written(folder: Path, text: str) -> Path:
    source = folder / "small.cpp"
    source.write_text(text)
    return source


def test_many_that_want_a_library_at_once_compile_it_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path, SOURCE)
    compiled: list[str] = []
    compile_ = native._compile

    def counted(compiler: str, source: Path, target: Path) -> None:
        compiled.append(target.name)
        compile_(compiler, source, target)

    monkeypatch.setattr(native, "_compile", counted)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: native.library(source).answer(), range(4)))
    assert answers == [42] * 4
    assert len(compiled) == 1
    assert [path.name for path in cache.glob("*.so")] == compiled
    assert not list(cache.glob("*.part"))


def test_what_a_killed_compiler_left_is_cleared_away(tmp_path: Path, cache: Path) -> None:
    source = written(tmp_path, SOURCE)
    target = native._target(source, str(shutil.which("g++")))
    target.parent.mkdir(parents=True)
    (cache / f"{target.stem}abcdefgh.part").write_bytes(b"half a library")
    (cache / "another-0123abcdefgh.part").write_bytes(b"somebody else compiles")
    assert native.library(source).answer() == 42
    assert [path.name for path in cache.glob("*.part")] == ["another-0123abcdefgh.part"]


def test_another_source_is_another_library(tmp_path: Path, cache: Path) -> None:
    assert native.library(written(tmp_path, SOURCE)).answer() == 42
    assert native.library(written(tmp_path, SOURCE.replace("42", "43"))).answer() == 43
    assert len(list(cache.glob("*.so"))) == 2


def test_a_compiler_that_does_not_know_this_cpu_compiles_for_any(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_NATIVE", "-march=nothing-known")
    assert native.library(written(tmp_path, SOURCE)).answer() == 42


def test_without_a_compiler_it_is_unavailable(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match=r"no g\+\+"):
        native.library(written(tmp_path, SOURCE))


def test_a_source_that_does_not_compile_is_unavailable(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"small\.cpp") as caught:
        native.library(written(tmp_path, "no C++"))
    assert isinstance(caught.value.__cause__, subprocess.CalledProcessError)
    assert not list(cache.glob("*.part"))


def test_a_broken_library_in_the_cache_is_unavailable(tmp_path: Path, cache: Path) -> None:
    source = written(tmp_path, SOURCE)
    native._target(source, str(shutil.which("g++"))).parent.mkdir(parents=True)
    native._target(source, str(shutil.which("g++"))).write_bytes(b"no library")
    with pytest.raises(Unavailable):
        native.library(source)


def test_a_cache_that_cannot_be_written_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RADIXMESH_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unavailable):
        native.library(written(tmp_path, SOURCE))
