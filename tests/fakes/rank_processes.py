"""Finds and ends rank processes by their titles, among the descendants of one front only."""

import asyncio

import psutil


def ranks_of(front_pid: int, place: str = "") -> list[psutil.Process]:
    """The rank processes of a front; `place` as in `dp=0 pp=0 tp=1` narrows it."""
    found = []
    for process in psutil.Process(front_pid).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("radixmesh-worker rank") and place in title:
            found.append(process)
    return found


async def gone(processes: list[psutil.Process]) -> None:
    """Wait until all have ended."""
    # The process table tells nobody; the front itself waits for these children.
    while any(process.is_running() and process.status() != "zombie" for process in processes):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
