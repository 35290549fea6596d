"""The detokenizer's contract: columns of ids to outputs, pieces of text back.

Knows frames and entries; decodes and matches nothing itself. One incoming frame is
answered by one frame, whatever the number of outputs in it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc.aio

from radixmesh.blocks import ID_BYTES, unpack_ids
from radixmesh.detokenizer.v1 import detokenizer_service_pb2 as pb
from radixmesh.detokenizer.v1 import detokenizer_service_pb2_grpc as pb_grpc
from radixmesh.errors import InvalidRequest, MeshError, QueueFull
from radixmesh.rpc.link import Identity, Lane, LinkLimits, Session, serve_link
from radixmesh.rpc.status import conceal
from radixmesh.telemetry.metrics import TextMetrics
from tokenizer_svc.detokenize.output import Output, OutputOptions, Progress
from tokenizer_svc.meter import Entry
from tokenizer_svc.vocab import Vocab

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["DetokenizerService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizerParts:
    """What the service stands on. `outputs_limit`: open outputs of one link."""

    model: str
    vocab: Vocab
    metrics: TextMetrics
    outputs_limit: int


class DetokenizerServicer(pb_grpc.DetokenizerServiceServicer):
    """radixmesh.detokenizer.v1.DetokenizerService."""

    def __init__(self, parts: DetokenizerParts, identity: Identity, limits: LinkLimits) -> None:
        self._parts = parts
        self._identity = identity
        self._limits = limits
        self._info = pb.DetokenizerInfo(model=parts.model, fingerprint=parts.vocab.fingerprint)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        pb_grpc.add_DetokenizerServiceServicer_to_server(self, server)

    async def Attach(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.AttachRequest],
        context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse],
    ) -> None:
        await serve_link(
            request_iterator,
            context,
            up=pb.AttachResponse,
            identity=self._identity,
            accept=self._accept,
            limits=self._limits,
        )

    async def Decode(
        self,
        request: pb.DecodeRequest,
        context: grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse],
    ) -> pb.DecodeResponse:
        # A whole output may be long: off the loop.
        return await asyncio.to_thread(decode_whole, self._parts, request)

    def _accept(self, session: Session[pb.AttachResponse]) -> "DetokenizeLink":
        session.send(pb.AttachResponse(info=self._info), Lane.CONTROL)
        return DetokenizeLink(session, self._parts)


@dataclass(frozen=True, slots=True)
class _Open:
    output: Output
    meter: Entry


class DetokenizeLink:
    """One router's outputs."""

    def __init__(self, session: Session[pb.AttachResponse], parts: DetokenizerParts) -> None:
        self._session = session
        self._parts = parts
        self._outputs: dict[int, _Open] = {}
        parts.metrics.links.inc()

    def __repr__(self) -> str:
        return f"DetokenizeLink(open={len(self._outputs)})"

    @property
    def open_count(self) -> int:
        """Outputs that have begun and not ended."""
        return len(self._outputs)

    def on_frame(self, frame: pb.AttachRequest) -> None:
        """Take a frame: opens, then ids, then ends. Entries that are not open are ignored."""
        reply = pb.AttachResponse()
        for opening in frame.opens:
            self._open(opening)
        for tokens in frame.tokens:
            self._take(tokens, reply)
        for entry_id in frame.ends:
            opened = self._outputs.get(entry_id)
            if opened:
                self._step(entry_id, reply, opened.output.finish, last=True)
        if reply.pieces or reply.dones:
            self._session.send(reply, Lane.CONTROL)

    def on_closed(self, error: MeshError) -> None:
        """The link is over; every output was dropped just before."""
        self._parts.metrics.links.dec()

    def on_feed_dropped(self) -> None:
        """There is no feed on this link."""

    def _open(self, opening: pb.Open) -> None:
        entry_id = opening.entry_id
        meter = Entry(self._parts.metrics)

        def on_cancel(error: MeshError) -> None:
            self._outputs.pop(entry_id, None)
            meter.end(error)

        if not self._session.open(entry_id, on_cancel):
            meter.end(InvalidRequest("the entry number is in use"))
            return
        try:
            if len(self._outputs) >= self._parts.outputs_limit:
                raise QueueFull("too many outputs are open", limit=self._parts.outputs_limit)
            output = Output(self._parts.vocab.pieces, to_options(opening.options))
        except MeshError as error:
            self._session.fail(entry_id, error)
            meter.end(error)
            return
        self._outputs[entry_id] = _Open(output, meter)

    def _take(self, tokens: pb.Tokens, reply: pb.AttachResponse) -> None:
        entry_ids, counts = tokens.entry_ids, tokens.counts
        fits = len(entry_ids) == len(tokens.positions) == len(counts)
        if not fits or sum(counts) * ID_BYTES != len(tokens.token_ids):
            error = InvalidRequest("columns of different lengths", field="tokens")
            for entry_id in entry_ids:
                self._fail(entry_id, error)
            return
        ids = unpack_ids(tokens.token_ids)
        start = 0
        for entry_id, position, count in zip(entry_ids, tokens.positions, counts, strict=True):
            part = ids[start : start + count]
            start += count
            opened = self._outputs.get(entry_id)
            if opened:
                self._step(entry_id, reply, partial(opened.output.feed, position, part))
        self._parts.metrics.tokens.inc(len(ids))
        self._parts.metrics.batch_entries.observe(len(entry_ids))

    def _step(
        self,
        entry_id: int,
        reply: pb.AttachResponse,
        step: Callable[[], Progress],
        *,
        last: bool = False,
    ) -> None:
        """Move one output on and add what it says to the reply."""
        try:
            progress = step()
        except MeshError as error:
            self._fail(entry_id, error)
            return
        except Exception as fault:  # noqa: BLE001 - logged by conceal; fails this output alone
            self._fail(entry_id, conceal(fault, "an output"))
            return
        self._parts.metrics.bytes.inc(len(progress.text.encode()))
        if last or progress.stop:
            self._done(entry_id, progress, reply)
        elif progress.text or progress.fresh:
            _add_piece(reply, entry_id, progress)

    def _done(self, entry_id: int, progress: Progress, reply: pb.AttachResponse) -> None:
        self._session.close(entry_id)
        self._outputs.pop(entry_id).meter.end()
        reply.dones.add(
            entry_id=entry_id,
            tail=progress.text,
            stop_matched=progress.stop,
            consumed_ids=progress.consumed,
            token_bytes=progress.rendered,
        )

    def _fail(self, entry_id: int, error: MeshError) -> None:
        opened = self._outputs.pop(entry_id, None)
        if opened:
            self._session.fail(entry_id, error)
            opened.meter.end(error)


def _add_piece(reply: pb.AttachResponse, entry_id: int, progress: Progress) -> None:
    reply.pieces.add(
        entry_id=entry_id,
        text=progress.text,
        consumed_ids=progress.consumed,
        token_bytes=progress.rendered,
    )


def decode_whole(parts: DetokenizerParts, request: pb.DecodeRequest) -> pb.DecodeResponse:
    """Return the text of one whole output.

    Raises:
        InvalidRequest: The stops are too many, too long or empty.
        UnknownToken: An id is outside the vocabulary.
    """
    output = Output(parts.vocab.pieces, to_options(request.options))
    steps = [output.feed(0, list(request.token_ids))]
    if not steps[0].stop:
        steps.append(output.finish())
    return pb.DecodeResponse(
        text="".join(step.text for step in steps),
        stop_matched=steps[-1].stop,
        consumed_ids=steps[-1].consumed,
    )


def to_options(message: pb.DecodeOptions) -> OutputOptions:
    """Return the options of a message."""
    return OutputOptions(
        stops=tuple(message.stop_strings),
        include_stop=message.include_stop,
        min_tokens=message.min_tokens,
        keep_special=message.keep_special_tokens,
        render=message.render_tokens,
    )
