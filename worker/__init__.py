"""The worker: a group of lockstep ranks that serves one model.

`python -m worker` runs it as a service. A program that wants outputs without a service, for
batch jobs or reinforcement learning, uses the same ranks through `Engine`:

    from worker import Engine, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.library import Engine, Options, Output, Piece, SamplingParams

__all__ = ["Engine", "Options", "Output", "Piece", "SamplingParams"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Late, so that a rank that imports its own modules does not load the library; and by
        # name, since to an import graph it would else seem that whoever imports a module of
        # this package imports the library.
        if name in __all__:
            return getattr(importlib.import_module("worker.library"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
