"""A worker group as a library: the same ranks, started by a program instead of a service."""

from worker.library.engine import Engine
from worker.library.prompts import Options
from worker.library.run import Output, Piece
from worker.library.sampling import SamplingParams

__all__ = ["Engine", "Options", "Output", "Piece", "SamplingParams"]
