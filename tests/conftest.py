"""Fixtures that every test may use. Run everything with `make test`."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.fakes.model_dir import make_model_dir

# A busy machine is no failure: pytest's timeout bounds every test already.
# `make test` gives the same verdict every time; `make test-long` searches anew at each run.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model directory without weights."""
    return make_model_dir(tmp_path_factory.mktemp("model") / "tiny")
