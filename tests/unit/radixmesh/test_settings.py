"""What a child process inherits, and what `--config` takes."""

from pathlib import Path

import pytest
from pydantic import Field

from radixmesh.settings import ServiceSettings, SettingsConfigDict, child_environment, load


class Some(ServiceSettings):
    """Some service."""

    model_config = SettingsConfigDict(env_prefix="RADIXMESH_SOME_")

    count: int = 1
    """How many."""


def test_help_says_that_there_are_files_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        load(Some, ["--help"], prog="some")
    assert leaving.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    wanted = "YAML or JSON; flags and RADIXMESH_SOME_<FLAG> variables go before it."
    assert f"--config FILE {wanted}" in shown


def test_help_leaves_out_defaults_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Others(Some):
        names: list[str] = Field(default_factory=list)
        """Whom."""
        note: str = ""
        """What about."""
        most: int | None = None
        """At most."""

    with pytest.raises(SystemExit):
        load(Others, ["--help"], prog="some")
    shown = capsys.readouterr().out
    assert shown.count("(default") == shown.count("(default: 1)") == 1


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"count: 1", b'{"count": 1}'])
def test_a_file_is_yaml_or_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.conf").write_bytes(content)
    argv = [f"--config={tmp_path / 'some.conf'}"]
    assert load(Some, argv, prog="some").count == 1
    assert load(Some, [*argv, "--count=2"], prog="some").count == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"count = 1\n", "is no YAML or JSON of the form 'name: value'"),
        (b"[some]\ncount = 1\n", "is neither YAML nor JSON, line 2"),
        (b"count: [\n", "is neither YAML nor JSON, line 2"),
        (b"\xff\xfe\x00", "is neither YAML nor JSON"),
        (b"- count", "is no YAML or JSON of the form 'name: value'"),
        (b"1: 2", "is no YAML or JSON of the form 'name: value'"),
    ],
)
def test_a_file_that_is_something_else_is_refused_in_one_line(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.conf"
    file.write_bytes(content)
    with pytest.raises(SystemExit) as leaving:
        load(Some, ["--config", str(file)], prog="some")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == f"some: --config: {file} {why}\n"


def test_a_default_holds_where_the_environment_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SOME_COUNT", raising=False)
    assert child_environment({"SOME_COUNT": "5"})["SOME_COUNT"] == "5"
    monkeypatch.setenv("SOME_COUNT", "7")
    assert child_environment({"SOME_COUNT": "5"})["SOME_COUNT"] == "7"
    assert child_environment({"SOME_COUNT": "5"}, SOME_COUNT="9")["SOME_COUNT"] == "9"
