"""What `auto` means for the ways between ranks, on the hosts that the settings name. Pure."""

import sys

from worker.settings import WorkerSettings


def choose_carrier(settings: WorkerSettings) -> str:
    """Return how records travel."""
    if settings.carrier != "auto":
        return settings.carrier
    return "local" if settings.nnodes == 1 else "gloo"


def choose_tensors(settings: WorkerSettings) -> str:
    """Return how the tensors of a stage travel."""
    if settings.tensors != "auto":
        return settings.tensors
    shared = settings.nnodes == 1 and settings.engine == "torch" and sys.platform == "linux"
    return "shm" if shared else "gloo"
