"""The composition root of both services: everything is made and connected here.

Knows the order of start and stop; encodes and decodes nothing.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from radixmesh.errors import MeshError
from radixmesh.models import resolve
from radixmesh.rpc.link import Identity, LinkLimits
from radixmesh.rpc.server import Register, Server
from radixmesh.telemetry.metrics import TextMetrics, serve_metrics
from tokenizer_svc.detokenize.service import SERVICE_NAME as DETOKENIZER
from tokenizer_svc.detokenize.service import DetokenizerParts, DetokenizerServicer
from tokenizer_svc.settings import DetokenizerSettings, TokenizerSettings
from tokenizer_svc.tokenize.batcher import Batcher, BatchLimits
from tokenizer_svc.tokenize.encoder import Encoder, Prompt
from tokenizer_svc.tokenize.service import SERVICE_NAME as TOKENIZER
from tokenizer_svc.tokenize.service import TokenizerParts, TokenizerServicer
from tokenizer_svc.vocab import Vocab

# After the last result, links may take so long to pass it on.
LAST_WRITES_S: Final = 0.2

OnReady = Callable[[int], None]


def served_name(settings: TokenizerSettings | DetokenizerSettings) -> str:
    """Return the name under which the model is served."""
    return settings.model_name or Path(settings.model).name


async def serve_tokenizer(
    settings: TokenizerSettings, stop: asyncio.Event, *, on_ready: OnReady = lambda _: None
) -> None:
    """Serve until `stop` is set, then finish what waits.

    Args:
        settings: The flags.
        stop: Set it to leave.
        on_ready: Told the bound port once the service takes work.

    Raises:
        InvalidRequest: There is no such model.
        OSError: A port can't be had.
    """
    vocab = Vocab.load(resolve(settings.model))
    metrics = TextMetrics(CollectorRegistry(), "tokenizer")
    encoder = Encoder(vocab, prompt_bytes_limit=settings.max_prompt_bytes)

    def work(prompts: Sequence[Prompt]) -> Sequence[bytes | MeshError]:
        metrics.batch_entries.observe(len(prompts))
        return encoder.encode(prompts)

    limits = BatchLimits(
        threads=settings.threads,
        waiting=settings.max_waiting,
        waiting_bytes=settings.max_waiting_bytes,
        batch=settings.max_batch,
    )
    batcher: Batcher[Prompt, bytes] = Batcher(work, limits)
    parts = TokenizerParts(
        model=served_name(settings), vocab=vocab, encoder=encoder, batcher=batcher, metrics=metrics
    )
    servicer = TokenizerServicer(parts, _identity("tokenizer"), LinkLimits())
    async with _serving(settings, TOKENIZER, servicer.add_to, metrics) as server:
        on_ready(server.port)
        await stop.wait()
        await server.drain()
        await batcher.close(settings.drain_s)


async def serve_detokenizer(
    settings: DetokenizerSettings, stop: asyncio.Event, *, on_ready: OnReady = lambda _: None
) -> None:
    """Serve until `stop` is set. Open outputs are dropped: routers replay them elsewhere.

    Args:
        settings: The flags.
        stop: Set it to leave.
        on_ready: Told the bound port once the service takes work.

    Raises:
        InvalidRequest: There is no such model.
        OSError: A port can't be had.
    """
    vocab = Vocab.load(resolve(settings.model))
    metrics = TextMetrics(CollectorRegistry(), "detokenizer")
    parts = DetokenizerParts(
        model=served_name(settings),
        vocab=vocab,
        metrics=metrics,
        outputs_limit=settings.max_outputs,
    )
    servicer = DetokenizerServicer(parts, _identity("detokenizer"), LinkLimits())
    async with _serving(settings, DETOKENIZER, servicer.add_to, metrics) as server:
        on_ready(server.port)
        await stop.wait()


@asynccontextmanager
async def _serving(
    settings: TokenizerSettings | DetokenizerSettings,
    name: str,
    register: Register,
    metrics: TextMetrics,
) -> AsyncGenerator[Server]:
    """Listen and say SERVING; on leaving say NOT_SERVING first, close last."""
    pages = serve_metrics(settings.metrics_port, metrics.registry, host=settings.host)
    server = Server(f"{settings.host}:{settings.port}", [(name, register)])
    try:
        await server.start()
        await server.health.set(name, True)
        yield server
    finally:
        await server.stop(LAST_WRITES_S)
        if pages:
            pages.close()


def _identity(name: str) -> Identity:
    return Identity(name, uuid.uuid4().hex)
