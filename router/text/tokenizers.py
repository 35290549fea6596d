"""Prompts -> ids, by whichever tokenizer is free.

It keeps no state, so any error of the place rather than of the prompt is tried
again elsewhere. Knows the tokenizer's link; nothing of workers.
"""

import asyncio
import random
from dataclasses import dataclass

import grpc

from radixmesh.common.v1 import generation_pb2
from radixmesh.errors import RESUMABLE, MeshError, ServiceUnavailable
from radixmesh.rpc.link import Identity, Lane, LinkLimits
from radixmesh.tokenizer.v1 import tokenizer_service_pb2 as pb
from radixmesh.tokenizer.v1 import tokenizer_service_pb2_grpc as pb_grpc
from router.request import ChatPrompt, TextPrompt
from router.text.instance import TextInstance
from router.text.pool import Pool, Serving

MAX_TRIES = 6
RETRY_PAUSE_S = 0.05
TRY_S = 15.0
# A prompt may take so many seconds more per byte of it: a tenth of what was ever seen.
SECONDS_PER_BYTE = 1e-5


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a prompt (little-endian uint32) and the fingerprint of the tokenizer."""

    ids: bytes
    fingerprint: str


class _Answer:
    """Waits for one result."""

    def __init__(self) -> None:
        self.ids: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_failed(self, error: MeshError) -> None:
        if not self.ids.done():
            self.ids.set_exception(error)

    def on_result(self, ids: bytes) -> None:
        if not self.ids.done():
            self.ids.set_result(ids)


class TokenizerInstance(TextInstance[pb.AttachRequest, pb.AttachResponse, _Answer]):
    """One tokenizer."""

    def __init__(
        self, address: str, *, identity: Identity, limits: LinkLimits, rng: random.Random
    ) -> None:
        self._heard_at = 0.0
        super().__init__(
            address,
            attach=_attach,
            down=pb.AttachRequest,
            identity=identity,
            limits=limits,
            rng=rng,
        )

    async def encode(self, prompt: pb.Prompt, *, timeout_s: float, silence_s: float) -> bytes:
        """Return the ids of one prompt.

        Args:
            prompt: Text or chat.
            timeout_s: Until the deadline.
            silence_s: If nothing has come from it for so long, that is held against it.

        Raises:
            ServiceUnavailable: It was silent.
            MeshError: Of the prompt, or of the place.
        """
        probes = self.ask()
        answer = _Answer()
        entry_id = self._link.open(answer, timeout_s=timeout_s)
        entry = pb.TokenizeEntry(
            entry_id=entry_id, remaining_ms=max(1, int(timeout_s * 1000)), prompt=prompt
        )
        try:
            self._link.send(pb.AttachRequest(tokenize=[entry]), Lane.WORK, entry_id=entry_id)
            await self._answered(answer, silence_s)
            return answer.ids.result()
        finally:
            # Nothing to do when the answer came; else the peer need not work on it.
            self._link.cancel(entry_id)
            if probes:
                self.gate.give_back()

    async def _answered(self, answer: _Answer, silence_s: float) -> None:
        """Wait for an answer as long as some answers come."""
        now = asyncio.get_running_loop().time
        began = now()
        while not answer.ids.done():
            left_s = max(began, self._heard_at) + silence_s - now()
            if left_s <= 0:
                self.blame()
                raise ServiceUnavailable(f"tokenizer {self.address} was silent")
            await asyncio.wait([answer.ids], timeout=left_s)

    def on_frame(self, frame: pb.AttachResponse, /) -> None:
        """Hand results to those who wait."""
        if frame.HasField("info"):
            self._came_up(frame.info.model, frame.info.fingerprint)
        if frame.results or frame.link.failures:
            self._heard_at = asyncio.get_running_loop().time()
            self.praise()
        for result in frame.results:
            answer = self._link.close(result.entry_id)
            if answer is not None:
                answer.on_result(result.token_ids)


class Tokenizers:
    """All tokenizers of the mesh.

    Args:
        pool: Those processes.
        wait_s: Seconds that a prompt waits for one to connect.
        try_s: When a tokenizer answers nothing for so many seconds, more for a long prompt,
            another is asked.
    """

    def __init__(
        self, pool: Pool[TokenizerInstance], *, wait_s: float, try_s: float = TRY_S
    ) -> None:
        self._pool = pool
        self._wait_s = wait_s
        self._try_s = try_s

    async def encode(
        self, prompt: TextPrompt | ChatPrompt, wanted: Serving, *, timeout_s: float
    ) -> Encoded:
        """Return the ids of a prompt, trying other tokenizers when one fails.

        Raises:
            ServiceUnavailable: No tokenizer could be reached.
            TokenizerMismatch: None loads the tokenizer of the workers.
            MeshError: The prompt is at fault, or the deadline passed.
        """
        message = _to_prompt(prompt)
        silence_s = self._try_s + SECONDS_PER_BYTE * message.ByteSize()
        tried: set[TokenizerInstance] = set()
        last: MeshError = ServiceUnavailable("no tokenizer is reachable")
        for _ in range(MAX_TRIES):
            instance = await self._pool.acquire(wanted, wait_s=self._wait_s, avoid=tried)
            if instance in tried:
                # It is the only one, and it was not able a moment ago.
                await asyncio.sleep(RETRY_PAUSE_S)
            serving = instance.serving
            try:
                ids = await instance.encode(message, timeout_s=timeout_s, silence_s=silence_s)
            except MeshError as error:
                if error.reason not in RESUMABLE:
                    raise
                tried.add(instance)
                last = error
                continue
            return Encoded(ids, serving.fingerprint if serving else wanted.fingerprint)
        raise last


def _attach(
    channel: grpc.aio.Channel,
) -> "grpc.aio.StreamStreamMultiCallable[pb.AttachRequest, pb.AttachResponse]":
    return pb_grpc.TokenizerServiceStub(channel).Attach


def _to_prompt(prompt: TextPrompt | ChatPrompt) -> pb.Prompt:
    if isinstance(prompt, TextPrompt):
        return pb.Prompt(text=prompt.text)
    turns = [
        generation_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in prompt.messages
    ]
    return pb.Prompt(
        chat=generation_pb2.ChatPrompt(
            messages=turns, add_generation_prompt=prompt.add_generation_prompt
        )
    )
