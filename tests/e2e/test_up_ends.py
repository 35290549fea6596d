"""A signal while a mesh streams: clients are told, and every process ends by itself."""

import asyncio
import time
from pathlib import Path

import pytest

from radixmesh.client import AsyncClient, Sampling
from radixmesh.errors import Draining
from tests.fakes.up import running_up

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

GRACE_S = 4.0


async def test_a_stream_that_outlasts_the_grace_is_told_and_nothing_is_killed(
    model_dir: Path, tmp_path: Path
) -> None:
    flags = ("--fake-decode-ms=50", f"--grace-s={GRACE_S}")
    async with (
        running_up(model_dir, tmp_path, *flags, groups=1) as up,
        AsyncClient(up.grpc) as client,
    ):
        stream = client.generate([5] * 4, sampling=Sampling(max_tokens=400))
        await anext(stream)
        began = time.monotonic()
        ending = asyncio.ensure_future(up.end())
        with pytest.raises(Draining):
            async for _ in stream:
                pass
        assert time.monotonic() - began < GRACE_S
        assert await ending == 0
    assert "killed" not in (tmp_path / "up.log").read_text()
