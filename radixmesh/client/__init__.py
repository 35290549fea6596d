"""The SDK: typed clients of the mesh, blocking and asyncio.

Errors are those of `radixmesh.errors`. Knows the contracts in `radixmesh.router.v1`
and nothing of how a router works.
"""

from radixmesh.client.aio import AsyncClient, AsyncFleetClient
from radixmesh.client.calls import Retry
from radixmesh.client.client import Client, FleetClient
from radixmesh.client.types import (
    CandidatePrice,
    Chunk,
    Explanation,
    Finish,
    FinishReason,
    Message,
    Model,
    Options,
    Output,
    Phase,
    Prompt,
    Receipt,
    Replica,
    Result,
    Sampling,
    TokenLogprob,
    Usage,
    View,
)

__all__ = [
    "AsyncClient",
    "AsyncFleetClient",
    "CandidatePrice",
    "Chunk",
    "Client",
    "Explanation",
    "Finish",
    "FinishReason",
    "FleetClient",
    "Message",
    "Model",
    "Options",
    "Output",
    "Phase",
    "Prompt",
    "Receipt",
    "Replica",
    "Result",
    "Retry",
    "Sampling",
    "TokenLogprob",
    "Usage",
    "View",
]
