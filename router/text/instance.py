"""A text service's process behind its link: what it serves, how busy it is. Knows no text."""

import asyncio
import random
from typing import Generic, TypeVar

from radixmesh.errors import MeshError
from radixmesh.rpc.dial import Attach
from radixmesh.rpc.frames import Frame, Identity, LinkLimits, Peer
from radixmesh.rpc.link import Link, Sink
from router.gates import Gate
from router.text.pool import OnChange, Serving

Down = TypeVar("Down", bound=Frame)
Up = TypeVar("Up", bound=Frame)
S = TypeVar("S", bound=Sink)

# One that owed an answer and was silent is asked nothing for so long, then once; and so on.
SHUN_S = 5.0
MOST_SHUN_S = 120.0


class TextInstance(Generic[Down, Up, S]):
    """The base of both services' instances, which take the frames.

    Args:
        address: host:port.
        attach: Returns the stub's `Attach` on a channel.
        down: The class of the frames to the service.
        identity: This router.
        limits: Of the link.
        rng: Jitter of its back-off.
    """

    def __init__(
        self,
        address: str,
        *,
        attach: Attach[Down, Up],
        down: type[Down],
        identity: Identity,
        limits: LinkLimits,
        rng: random.Random,
    ) -> None:
        self.address = address
        # Told when it came up or was lost; set by the pool.
        self.on_change: OnChange = lambda *, up: None  # noqa: ARG005
        self.gate = Gate(SHUN_S, MOST_SHUN_S)
        self._serving: Serving | None = None
        self._link: Link[Down, Up, S] = Link(
            address,
            attach=attach,
            down=down,
            listener=self,
            identity=identity,
            limits=limits,
            rng=rng,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address} {self._serving} load {self.load}>"

    @property
    def serving(self) -> Serving | None:
        """What it serves, or None while it is not connected."""
        return self._serving

    @property
    def load(self) -> int:
        """How many entries it has."""
        return len(self._link.entries)

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes."""
        return self._link.pending_bytes

    @property
    def shunned(self) -> bool:
        """Whether others are to be asked first, because it was silent."""
        return not self.gate.allows(asyncio.get_running_loop().time())

    def ask(self) -> bool:
        """It is asked something; return whether that is a probe, which is given back unanswered."""
        return self.gate.take(asyncio.get_running_loop().time())

    def blame(self) -> None:
        """It owed an answer and was silent for too long."""
        self.gate.trip(asyncio.get_running_loop().time())

    def praise(self) -> None:
        """It answered something."""
        if not self.gate.closed:
            self.gate.close()
            self.gate.reset()

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        await self._link.run()

    def on_up(self, peer: Peer, /, *, is_new: bool) -> None:
        """Wait for `info`, which is in the first frame."""

    def on_frame(self, frame: Up, /) -> None:
        """Take a frame; the first one has `info`."""
        raise NotImplementedError

    def on_down(self, error: MeshError, /) -> None:
        """Take nothing until it is connected again."""
        del error  # the link has logged it, and the entries know
        self.gate.close()
        if self._serving is not None:
            self._serving = None
            self.on_change(up=False)

    def _came_up(self, model: str, fingerprint: str) -> None:
        self._serving = Serving(model, fingerprint)
        self.on_change(up=True)
