"""The tokenizer's contract: protobuf to prompts and back, on links and in plain calls.

Knows frames and entries; encodes nothing itself.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc.aio

from radixmesh.blocks import ID_BYTES, unpack_ids
from radixmesh.errors import Cancelled, InvalidRequest, MeshError, UnknownToken
from radixmesh.rpc.link import Identity, Lane, LinkLimits, Session, serve_link
from radixmesh.telemetry.metrics import TextMetrics
from radixmesh.tokenizer.v1 import tokenizer_service_pb2 as pb
from radixmesh.tokenizer.v1 import tokenizer_service_pb2_grpc as pb_grpc
from tokenizer_svc.meter import Entry
from tokenizer_svc.tokenize.batcher import Batcher, Job
from tokenizer_svc.tokenize.encoder import ChatPrompt, Encoder, Prompt, TextPrompt
from tokenizer_svc.vocab import Turn, Vocab

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["TokenizerService"].full_name

EncodeBatcher = Batcher[Prompt, bytes]
EncodeJob = Job[Prompt, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """What the service stands on."""

    model: str
    vocab: Vocab
    encoder: Encoder
    batcher: EncodeBatcher
    metrics: TextMetrics


class TokenizerServicer(pb_grpc.TokenizerServiceServicer):
    """radixmesh.tokenizer.v1.TokenizerService."""

    def __init__(self, parts: TokenizerParts, identity: Identity, limits: LinkLimits) -> None:
        self._parts = parts
        self._identity = identity
        self._limits = limits
        vocab = parts.vocab
        self._info = pb.TokenizerInfo(
            model=parts.model,
            fingerprint=vocab.fingerprint,
            vocab_size=vocab.size,
            has_chat_template=vocab.has_chat_template,
            max_prompt_bytes=parts.encoder.prompt_bytes_limit,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        pb_grpc.add_TokenizerServiceServicer_to_server(self, server)

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

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        ids = await _encoded(self._parts, request.prompt)
        return pb.TokenizeResponse(token_ids=unpack_ids(ids), fingerprint=self._info.fingerprint)

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        ids = list(request.token_ids)
        _check_ids(ids, self._info.vocab_size)
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        decode = partial(self._parts.vocab.pieces.decode, ids, keep_special=not skip)
        return pb.DetokenizeResponse(text=await asyncio.to_thread(decode))

    async def GetTokenizer(
        self,
        request: pb.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse],
    ) -> pb.GetTokenizerResponse:
        return pb.GetTokenizerResponse(info=self._info)

    def _accept(self, session: Session[pb.AttachResponse]) -> "TokenizeLink":
        session.send(pb.AttachResponse(info=self._info), Lane.CONTROL)
        return TokenizeLink(session, self._parts)


class TokenizeLink:
    """One router's prompts."""

    def __init__(self, session: Session[pb.AttachResponse], parts: TokenizerParts) -> None:
        self._session = session
        self._parts = parts
        self._jobs: dict[int, EncodeJob] = {}
        parts.metrics.links.inc()

    def __repr__(self) -> str:
        return f"TokenizeLink(open={len(self._jobs)})"

    def on_frame(self, frame: pb.AttachRequest) -> None:
        """Take the prompts of a frame."""
        for entry in frame.tokenize:
            self._open(entry)

    def on_closed(self, error: MeshError) -> None:
        """The link is over; every entry was cancelled just before."""
        self._parts.metrics.links.dec()

    def on_feed_dropped(self) -> None:
        """There is no feed on this link."""

    def _open(self, entry: pb.TokenizeEntry) -> None:
        entry_id = entry.entry_id
        meter = Entry(self._parts.metrics)

        def on_cancel(error: MeshError) -> None:
            job = self._jobs.pop(entry_id, None)
            if job:
                job.cancel()
            meter.end(error)

        def on_done(result: bytes | MeshError) -> None:
            self._jobs.pop(entry_id, None)
            self._answer(entry_id, result, meter)

        if not self._session.open(entry_id, on_cancel, remaining_ms=entry.remaining_ms):
            meter.end(InvalidRequest("the entry number is in use"))
            return
        try:
            prompt = to_prompt(entry.prompt)
            size = self._parts.encoder.check(prompt)
            self._jobs[entry_id] = self._parts.batcher.submit(prompt, size, on_done)
            self._parts.metrics.bytes.inc(size)
        except MeshError as error:
            self._answer(entry_id, error, meter)

    def _answer(self, entry_id: int, result: bytes | MeshError, meter: Entry) -> None:
        if isinstance(result, MeshError):
            self._session.fail(entry_id, result)
            meter.end(result)
            return
        self._session.close(entry_id)
        reply = pb.AttachResponse()
        reply.results.add(entry_id=entry_id, token_ids=result)
        self._session.send(reply, Lane.CONTROL)
        self._parts.metrics.tokens.inc(len(result) // ID_BYTES)
        meter.end()


def to_prompt(message: pb.Prompt) -> Prompt:
    """Return the prompt of a message.

    Raises:
        InvalidRequest: It holds neither text nor a conversation.
    """
    which = message.WhichOneof("input")
    if which is None:
        raise InvalidRequest("the prompt has neither text nor chat", field="prompt")
    add = message.add_special_tokens if message.HasField("add_special_tokens") else which == "text"
    if which == "text":
        return TextPrompt(message.text, add)
    chat = message.chat
    generation = chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
    turns = tuple(Turn(turn.role, turn.content) for turn in chat.messages)
    return ChatPrompt(turns, add_generation_prompt=generation, add_special_tokens=add)


async def _encoded(parts: TokenizerParts, message: pb.Prompt) -> bytes:
    """Encode for a plain call; leaving early takes the prompt out of the queue."""
    meter = Entry(parts.metrics)
    future: asyncio.Future[bytes | MeshError] = asyncio.get_running_loop().create_future()
    outcome: MeshError | None = Cancelled("the caller left")
    job: EncodeJob | None = None

    def on_done(result: bytes | MeshError) -> None:
        if not future.done():  # a cancelled caller has not run on yet
            future.set_result(result)

    try:
        prompt = to_prompt(message)
        size = parts.encoder.check(prompt)
        job = parts.batcher.submit(prompt, size, on_done)
        parts.metrics.bytes.inc(size)
        result = await future
        if isinstance(result, MeshError):
            raise result
        outcome = None
    except MeshError as error:
        outcome = error
        raise
    finally:
        if job:
            job.cancel()
        meter.end(outcome)
    parts.metrics.tokens.inc(len(result) // ID_BYTES)
    return result


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise UnknownToken(
            f"token id {max(ids)} is outside the vocabulary",
            field="token_ids",
            vocab_size=vocab_size,
        )
