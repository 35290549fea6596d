"""`radixmesh-convert`: whole or absent, once, and usable by every service.

Run: pytest tests/unit/worker/model/test_convert.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from radixmesh import models
from radixmesh.errors import InvalidRequest
from radixmesh.settings import child_environment
from tests.fakes.plans import Stream, reserved, run
from tests.fakes.tiny_gguf import CONTEXT, make_gguf
from tests.fakes.tiny_models import generate
from worker.config import RankConfig
from worker.engine.torch_engine import TorchEngine
from worker.model.convert import main

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RADIXMESH_CACHE", str(folder))
    return folder


@pytest.fixture
def gguf(tmp_path: Path, model_dir: Path) -> Path:
    return make_gguf(tmp_path / "tiny.gguf", model_dir)


def start(gguf: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "worker.model.convert", str(gguf)],
        env=child_environment(RADIXMESH_CACHE=str(cache)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_a_hugging_face_directory_is_printed_and_left_alone(
    model_dir: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model_dir)]) == 0
    assert capsys.readouterr().out == f"{model_dir}\n"
    assert not cache.exists()


def test_a_missing_model_is_one_line_and_status_1(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["/nowhere"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "'/nowhere'" in said.err


def test_a_gguf_becomes_a_directory_that_gives_the_same_ids_and_template(
    gguf: Path, model_dir: Path, cache: Path
) -> None:
    with pytest.raises(InvalidRequest, match=f"radixmesh-convert {gguf}"):
        models.resolve(str(gguf))
    assert main([str(gguf)]) == 0
    folder = models.resolve(str(gguf))
    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(model_dir)
    text = "<|im_start|>user\nThe fox, Привет 2024 😀<|im_end|>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())


def test_a_converted_model_generates_what_transformers_generates_from_it(
    gguf: Path, cache: Path
) -> None:
    assert main([str(gguf)]) == 0
    folder = models.resolve(str(gguf))
    config = RankConfig(model_dir=str(folder), dtype="float32", kv_tokens=64, threads=1)
    engine = reserved(TorchEngine.load(config))
    assert (engine.info.max_model_len, engine.info.eos_ids) == (CONTEXT, (1,))
    stream = Stream([5, 9, 300], [2, 0])
    run(engine, [stream], 8)
    assert stream.output == generate(folder, [5, 9, 300], 8)


def test_a_second_conversion_does_nothing(
    gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(gguf)])
    first = capsys.readouterr()
    main([str(gguf)])
    second = capsys.readouterr()
    assert "converting" in first.err
    assert second.err == ""
    assert first.out == second.out


def test_two_conversions_at_once_convert_once(gguf: Path, cache: Path) -> None:
    both = [start(gguf, cache), start(gguf, cache)]
    said = [process.communicate(timeout=80) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][0] == said[1][0] != ""
    assert (said[0][1] + said[1][1]).count("converting") == 1


def test_a_killed_conversion_leaves_no_model_and_does_not_stop_the_next(
    gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(gguf, cache)
    assert process.stderr is not None
    assert "converting" in process.stderr.readline()
    process.kill()
    process.communicate(timeout=10)
    with pytest.raises(InvalidRequest, match="not converted"):
        models.resolve(str(gguf))
    assert main([str(gguf)]) == 0
    assert names(cache) == {models.resolve(str(gguf)).name}


def test_what_a_killed_conversion_left_is_cleared_away(gguf: Path, cache: Path) -> None:
    folder = models.converted_dir(gguf)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{")
    (partial / "stale").write_text("")
    assert main([str(gguf)]) == 0
    assert names(cache) == {folder.name}
    assert not (folder / "stale").exists()


def test_a_file_that_is_no_gguf_fails_and_leaves_nothing(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, it says, but it is not")
    assert main([str(broken)]) == 1
    assert str(broken) in capsys.readouterr().err
    assert names(cache) == set()


def test_a_changed_gguf_is_converted_anew(gguf: Path, cache: Path) -> None:
    before = models.converted_dir(gguf)
    os.utime(gguf, (1, 1))
    assert models.converted_dir(gguf) != before


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_converted_model_can_be_had_elsewhere_too(
    gguf: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "models" / "mine"
    assert main([str(gguf), f"--output={output}"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert models.resolve(str(output)) == output
    assert content(output) == content(models.resolve(str(gguf)))
    assert {path.name for path in output.parent.iterdir() if path.is_dir()} == {"mine"}


def test_what_lies_at_the_output_is_left_when_it_is_the_same_and_replaced_when_not(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    output = tmp_path / "mine"
    assert main([str(model_dir), f"--output={output}"]) == 0
    before = output.stat().st_ino
    assert main([str(model_dir), f"--output={output}"]) == 0
    assert output.stat().st_ino == before
    (output / "stale.json").write_text("{}")
    assert main([str(model_dir), f"--output={output}"]) == 0
    assert content(output) == content(model_dir)


def test_a_folder_that_holds_no_model_is_never_written_over(
    model_dir: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main([str(model_dir), f"--output={tmp_path}"]) == 1
    assert "--output" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_output_that_cannot_be_written_is_one_line_and_status_1(
    model_dir: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model_dir), "--output=/proc/nothing/mine"]) == 1
    assert "/proc/nothing" in capsys.readouterr().err
