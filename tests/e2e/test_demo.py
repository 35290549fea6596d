"""`radixmesh demo`: what it shows, and that nothing of it remains."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e


async def demo(folder: Path, *flags: str) -> tuple[int | None, str]:
    """Run it in a folder of its own, by which its processes are known."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "radixmesh.cli.main", "demo", *flags),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


def left_behind(folder: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if _cwd(each) == str(folder)]


def _cwd(process: psutil.Process) -> str:
    try:
        return str(process.cwd())
    except psutil.Error:  # it ended, or is a zombie
        return ""


@pytest.mark.timeout(90)
async def test_the_demo_shows_both_edges_a_reused_prefix_and_the_fleet(
    model_dir: Path, tmp_path: Path
) -> None:
    status, shown = await demo(tmp_path, "--engine=fake", f"--model={model_dir}")
    assert status == 0, shown
    assert "over gRPC" in shown
    assert "over HTTP" in shown
    assert "worker-1/0" in shown
    assert left_behind(tmp_path) == []


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_the_demo_runs_on_the_default_model(tmp_path: Path) -> None:
    status, shown = await demo(tmp_path)
    assert status == 0, shown
    assert "smollm2" in shown
    assert left_behind(tmp_path) == []


@pytest.mark.timeout(60)
async def test_a_demo_without_a_model_says_what_to_do(tmp_path: Path) -> None:
    status, shown = await demo(tmp_path, f"--model={tmp_path / 'nothing'}")
    assert status == 1
    assert "no model at" in shown
