"""What hosts must have been told alike, and what may differ."""

from pathlib import Path

import msgspec
import pytest

from worker.config import FakeConfig, RankConfig
from worker.node.agreement import difference, shared_settings


def told(model_dir: Path, **values: object) -> dict[str, str]:
    config = RankConfig(model_dir=str(model_dir), engine="fake", tp=2)
    return shared_settings(msgspec.structs.replace(config, **values), 2)


def test_what_concerns_one_host_only_may_differ(model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in model_dir.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    other = told(copy, threads=3, host="10.0.0.2", log_level="DEBUG", spin=True, kv_bytes=1 << 20)
    assert difference(told(model_dir), other) == ""


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 4},
        {"engine": "torch"},
        {"max_batched_tokens": 7},
        {"overlap": True},
        {"dtype": "float32"},
        {"fake": FakeConfig(decode_ms=1)},
    ],
)
def test_what_a_plan_or_a_tensor_depends_on_must_not(
    model_dir: Path, values: dict[str, object]
) -> None:
    [name] = values
    assert difference(told(model_dir), told(model_dir, **values)).startswith(f"{name} is ")


def test_another_model_is_noticed_by_its_files(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = difference(told(model_dir), told(tmp_path))
    assert "config.json is" in said
    assert "tokenizer.json is" in said
