"""What a child process inherits."""

import pytest

from radixmesh.settings import child_environment


def test_a_default_holds_where_the_environment_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SOME_COUNT", raising=False)
    assert child_environment({"SOME_COUNT": "5"})["SOME_COUNT"] == "5"
    monkeypatch.setenv("SOME_COUNT", "7")
    assert child_environment({"SOME_COUNT": "5"})["SOME_COUNT"] == "7"
    assert child_environment({"SOME_COUNT": "5"}, SOME_COUNT="9")["SOME_COUNT"] == "9"
