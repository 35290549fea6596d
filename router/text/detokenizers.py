"""Streams of ids -> streams of text, by whichever detokenizer is free.

Knows the detokenizer's link and the ids on their way to it; what must be
replayed after a loss is the journal's business. What all outputs say in one turn
of the event loop leaves in one frame, in columns.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from radixmesh.blocks import ID_BYTES
from radixmesh.detokenizer.v1 import detokenizer_service_pb2 as pb
from radixmesh.detokenizer.v1 import detokenizer_service_pb2_grpc as pb_grpc
from radixmesh.errors import LinkLost, LinkOverloaded, MeshError
from radixmesh.rpc.link import Identity, Lane, LinkLimits
from router.text.instance import TextInstance
from router.text.pool import Pool, Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How an output is turned into text; see radixmesh.detokenizer.v1.DecodeOptions."""

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    keep_special_tokens: bool = False
    render_tokens: bool = False


class TextSink(Protocol):
    """What waits for the text of one output. Called on the event loop; must not raise."""

    def on_piece(self, text: str, consumed: int, token_bytes: Sequence[bytes]) -> None:
        """Text became certain; `consumed` ids from position 0 on are covered by all so far."""

    def on_done(
        self, tail: str, stop_matched: str, consumed: int, token_bytes: Sequence[bytes]
    ) -> None:
        """The output's text has ended; nothing follows."""

    def on_failed(self, error: MeshError) -> None:
        """The entry is gone; nothing follows."""


class _Outbox:
    """What outputs want to say until the end of this turn of the loop."""

    def __init__(self) -> None:
        self.opens: dict[int, DecodeOptions] = {}
        self.tokens: list[tuple[int, int, bytes]] = []
        self.ends: list[int] = []

    def frame(self, alive: Callable[[int], bool]) -> pb.AttachRequest:
        """Return one frame; entries that are closed already are left out."""
        tokens = [item for item in self.tokens if alive(item[0])]
        frame = pb.AttachRequest(ends=filter(alive, self.ends))
        for entry_id, options in self.opens.items():
            if alive(entry_id):
                frame.opens.append(_to_open(entry_id, options))
        if tokens:
            frame.tokens.add(
                entry_ids=[entry_id for entry_id, _, _ in tokens],
                positions=[position for _, position, _ in tokens],
                counts=[len(ids) // ID_BYTES for _, _, ids in tokens],
                token_ids=b"".join([ids for _, _, ids in tokens]),
            )
        return frame

    def entry_ids(self) -> set[int]:
        """Everybody who has something in here."""
        return {*self.opens, *self.ends, *(entry_id for entry_id, _, _ in self.tokens)}


class TextEntry:
    """One output at one detokenizer."""

    def __init__(self, instance: "DetokenizerInstance", entry_id: int, *, probes: bool) -> None:
        self.instance = instance
        self._entry_id = entry_id
        self._probes = probes

    def feed(self, position: int, ids: bytes) -> None:
        """Send ids, of which the first stands at `position`."""
        if ids:
            self.instance.feed(self._entry_id, position, ids)

    def end(self) -> None:
        """Say that all ids have been sent."""
        self.instance.end(self._entry_id)

    def blame(self) -> None:
        """Hold against the detokenizer that it was silent: others are asked first."""
        self.instance.blame()
        self._probes = False

    def cancel(self) -> None:
        """Give the entry up; idempotent."""
        self.instance.cancel(self._entry_id)
        if self._probes:
            self._probes = False
            self.instance.gate.give_back()


class DetokenizerInstance(TextInstance[pb.AttachRequest, pb.AttachResponse, TextSink]):
    """One detokenizer."""

    def __init__(
        self, address: str, *, identity: Identity, limits: LinkLimits, rng: random.Random
    ) -> None:
        self._outbox: _Outbox | None = None
        super().__init__(
            address,
            attach=_attach,
            down=pb.AttachRequest,
            identity=identity,
            limits=limits,
            rng=rng,
        )

    def open(self, sink: TextSink, options: DecodeOptions) -> TextEntry:
        """Begin an output.

        Raises:
            LinkLost: It is not connected any more.
        """
        entry_id = self._link.open(sink)
        self._box().opens[entry_id] = options
        return TextEntry(self, entry_id, probes=self.ask())

    def feed(self, entry_id: int, position: int, ids: bytes) -> None:
        """Send ids of an output; ignored when it is closed."""
        if entry_id in self._link.entries:
            self._box().tokens.append((entry_id, position, ids))

    def end(self, entry_id: int) -> None:
        """Say that all ids of an output have been sent; ignored when it is closed."""
        if entry_id in self._link.entries:
            self._box().ends.append(entry_id)

    def cancel(self, entry_id: int) -> None:
        """Give an output up; idempotent."""
        self._link.cancel(entry_id)

    def _box(self) -> _Outbox:
        if self._outbox is None:
            self._outbox = _Outbox()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outbox

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        frame = outbox.frame(self._link.entries.__contains__)
        if not (frame.opens or frame.tokens or frame.ends):
            return
        try:
            # One lane for all of it, and for cancels: a cancel must not come before its open.
            self._link.send(frame, Lane.CONTROL)
        except LinkLost:
            # Every entry hears it from the link itself.
            return
        except LinkOverloaded as error:
            self._give_up(outbox, error)

    def _give_up(self, outbox: _Outbox, error: MeshError) -> None:
        # What was in the outbox is lost, so those entries can't go on here.
        for entry_id in outbox.entry_ids():
            sink = self._link.entries.get(entry_id)
            if sink is not None:
                self._link.cancel(entry_id)
                sink.on_failed(error)

    def on_frame(self, frame: pb.AttachResponse, /) -> None:
        """Hand text to those who wait."""
        if frame.HasField("info"):
            self._came_up(frame.info.model, frame.info.fingerprint)
        if frame.pieces or frame.dones or frame.link.failures:
            self.praise()
        for piece in frame.pieces:
            sink = self._link.entries.get(piece.entry_id)
            if sink is not None:
                sink.on_piece(piece.text, piece.consumed_ids, piece.token_bytes)
        for done in frame.dones:
            sink = self._link.close(done.entry_id)
            if sink is not None:
                sink.on_done(done.tail, done.stop_matched, done.consumed_ids, done.token_bytes)

    def on_down(self, error: MeshError, /) -> None:
        """Take no outputs until it is connected again."""
        self._outbox = None
        super().on_down(error)


class Detokenizers:
    """All detokenizers of the mesh."""

    def __init__(self, pool: Pool[DetokenizerInstance]) -> None:
        self._pool = pool

    async def open(
        self,
        sink: TextSink,
        options: DecodeOptions,
        wanted: Serving,
        *,
        wait_s: float,
    ) -> TextEntry:
        """Begin an output at the least loaded detokenizer that fits.

        Raises:
            ServiceUnavailable: None connected within `wait_s`.
            TokenizerMismatch: None loads the tokenizer of the workers.
            LinkLost: It was lost in this moment.
        """
        instance = await self._pool.acquire(wanted, wait_s=wait_s)
        return instance.open(sink, options)


def _attach(
    channel: grpc.aio.Channel,
) -> "grpc.aio.StreamStreamMultiCallable[pb.AttachRequest, pb.AttachResponse]":
    return pb_grpc.DetokenizerServiceStub(channel).Attach


def _to_open(entry_id: int, options: DecodeOptions) -> pb.Open:
    return pb.Open(
        entry_id=entry_id,
        options=pb.DecodeOptions(
            stop_strings=options.stop_strings,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
            keep_special_tokens=options.keep_special_tokens,
            render_tokens=options.render_tokens,
        ),
    )
