"""What the pipeline needs of the fleet and of the text services. Knows no link and no wire.

The fleet (`router/fleet`) and the pools (`router/text`) are the real ones; tests
bring small ones of their own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from router.fleet.ask import Ask, ModelInfo, SubmitSpec, WorkerSink
from router.fleet.booking import Booking
from router.fleet.views import CandidatePrice
from router.request import ChatPrompt, TextPrompt
from router.text.detokenizers import DecodeOptions, TextSink
from router.text.pool import Serving
from router.text.tokenizers import Encoded


class Permit(Protocol):
    """Leave to run one request."""

    async def take_tokens(self, most: int, used: Callable[[], int]) -> None:
        """Hold tokens until the permit ends; `used` says then how many were. May wait.

        Raises QueueFull, RateLimited.
        """


class Admit(Protocol):
    """Gives permits, each for the time of its context."""

    def __call__(
        self, timeout_s: float, *, priority: int, tenant: str
    ) -> AbstractAsyncContextManager[Permit]:
        """Wait for a permit, at most so many seconds. Raises QueueFull, RateLimited."""


class Ticket(Protocol):
    """A submitted attempt."""

    def cancel(self) -> None:
        """Give it up; idempotent."""


class Fleet(Protocol):
    """The replicas of the mesh."""

    def models(self) -> Sequence[ModelInfo]:
        """All served models."""

    def limits(self, model: str) -> ModelInfo:
        """One model; an empty name is the only one. Raises ModelNotServed, NoReplicaReady."""

    def place(self, ask: Ask) -> Booking:
        """Choose a replica. Raises ModelNotServed, NoReplicaReady, TokenizerMismatch."""

    async def wait_ready(self, model: str, *, resume: bool = False) -> None:
        """Return when some replica of the model can take work; resumes go first."""

    def submit(self, booking: Booking, spec: SubmitSpec, sink: WorkerSink) -> Ticket:
        """Send an attempt. Raises LinkLost, LinkOverloaded."""

    def explain(self, ask: Ask) -> Sequence[CandidatePrice]:
        """Price every replica."""


class TextEntry(Protocol):
    """One output at a detokenizer."""

    def feed(self, position: int, ids: bytes) -> None:
        """Send ids, of which the first stands at `position`."""

    def end(self) -> None:
        """Say that all ids have been sent."""

    def blame(self) -> None:
        """Hold against its detokenizer that it was silent: others are asked first."""

    def cancel(self) -> None:
        """Give it up; idempotent."""


class Encoder(Protocol):
    """The tokenizers."""

    async def encode(
        self, prompt: TextPrompt | ChatPrompt, wanted: Serving, *, timeout_s: float
    ) -> Encoded:
        """Return the ids of a prompt."""


class Decoder(Protocol):
    """The detokenizers."""

    async def open(
        self, sink: TextSink, options: DecodeOptions, wanted: Serving, *, wait_s: float
    ) -> TextEntry:
        """Begin an output; nothing is awaited between its beginning and the return."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The text services."""

    encoder: Encoder
    decoder: Decoder
