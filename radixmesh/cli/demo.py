"""`radixmesh demo`: a whole mesh for a minute, shown at work, then gone. Judges what it shows."""

import asyncio
import http.client
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Console

from radixmesh.cli.mesh import Mesh, local_mesh
from radixmesh.cli.plan import UpSettings
from radixmesh.cli.processes import Say, ServiceFailed
from radixmesh.cli.show import footer, replicas_table
from radixmesh.client import AsyncClient, AsyncFleetClient, Finish, Message, Sampling
from radixmesh.errors import MeshError
from radixmesh.rpc.lifecycle import run_until_signal
from radixmesh.settings import load

_QUESTION = "In two sentences: why does the sky look blue in the day and red in the evening?"
_NEXT_QUESTION = "And what colour has the sky on the Moon?"
_SHORT_QUESTION = "What is the capital of France?"
_SAMPLING = Sampling(temperature=0.0, max_tokens=64)


class DemoFailed(Exception):
    """The mesh answered, but not as it should."""


def demo(argv: Sequence[str]) -> int:
    """Show the mesh at work on free ports; return the exit status."""
    settings = load(UpSettings, argv, prog="radixmesh demo").model_copy(update={"port_base": 0})
    console = Console()
    log: deque[str] = deque(maxlen=200)

    def say(name: str, line: str) -> None:
        log.append(f"{name}: {line}")
        if name == "convert":
            console.print(line, style="dim", markup=False, highlight=False)

    async def main(stop: asyncio.Event) -> None:
        showing = asyncio.ensure_future(_show(settings, console, say))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({showing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        showing.cancel()
        await showing

    try:
        asyncio.run(run_until_signal(main))
    except (ServiceFailed, DemoFailed, MeshError, OSError) as error:
        sys.stderr.write("\n".join([*log, f"radixmesh demo: {error}", ""]))
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    return 0


async def _show(settings: UpSettings, console: Console, say: Say) -> None:
    console.print("starting a router, a tokenizer, a detokenizer and the worker groups ...")
    async with local_mesh(settings, say) as mesh:
        console.rule("a streamed answer over gRPC")
        async with AsyncClient(mesh.address("grpc"), api_key=settings.api_key or "") as client:
            first = [Message("user", _QUESTION)]
            text, _ = await _stream(client, first, console)
            console.rule("a streamed answer over HTTP")
            await _stream_http(mesh, console)
            console.rule("the second turn of the chat")
            second = [*first, Message("assistant", text), Message("user", _NEXT_QUESTION)]
            _, finish = await _stream(client, second, console)
        _judge(finish)
        async with AsyncFleetClient(mesh.address("fleet")) as fleet:
            console.print(replicas_table(await fleet.list_replicas()))


async def _stream(
    client: AsyncClient, messages: list[Message], console: Console
) -> tuple[str, Finish]:
    """Show an answer as it comes; return its text and end."""
    console.print(f"> {messages[-1].content}", style="bold", markup=False)
    text = ""
    finish = None
    async for chunk in client.generate(messages, sampling=_SAMPLING):
        console.out(chunk.text, end="", highlight=False)
        text += chunk.text
        finish = chunk.finish
    console.print()
    if finish is None or not text:
        raise DemoFailed("a stream over gRPC had no text or no end")
    console.print(footer(finish.usage, finish.receipt), style="dim", highlight=False)
    return text, finish


async def _stream_http(mesh: Mesh, console: Console) -> None:
    console.print(f"> {_SHORT_QUESTION}", style="bold", markup=False)
    words = 0
    lines = _sse_texts(mesh)
    while (text := await asyncio.to_thread(next, lines, None)) is not None:
        console.out(text, end="", highlight=False)
        words += bool(text)
    console.print()
    if not words:
        raise DemoFailed("a stream over HTTP had no text")


def _sse_texts(mesh: Mesh) -> Iterator[str]:
    """Yield the texts of a streamed chat completion. Blocks."""
    messages = [{"role": "user", "content": _SHORT_QUESTION}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {mesh.settings.api_key or ''}",
    }
    connection = http.client.HTTPConnection(mesh.settings.host, mesh.ports["http"], timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        for line in connection.getresponse():
            data = line.strip().removeprefix(b"data: ")
            if data.startswith(b"{"):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise DemoFailed(chunk["error"]["message"])
                yield "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    finally:
        connection.close()


def _judge(finish: Finish) -> None:
    """Check that the second turn found the first's blocks, as many as the router predicted."""
    receipt = finish.receipt
    if not 0 < receipt.predicted_blocks == receipt.actual_blocks:
        raise DemoFailed(
            f"the second turn reused {receipt.actual_blocks} blocks, "
            f"predicted were {receipt.predicted_blocks}"
        )
