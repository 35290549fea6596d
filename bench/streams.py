"""The clients of `bench.mesh`, in a process of their own: many gRPC streams at once.

    python -m bench.streams ADDRESS --streams N --tokens M [--rounds R]

Each of N clients sends R requests, one after the other, of M tokens; prints one line
of JSON: what was delivered, how fast, and how long first tokens took.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from radixmesh.router.v1 import router_service_pb2 as pb
from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub

if TYPE_CHECKING:
    from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceAsyncStub

TIMEOUT_S = 300.0


@dataclass
class Tally:
    """What all streams got."""

    tokens: int = 0
    messages: int = 0
    first_token_s: list[float] = field(default_factory=list)


def request(client: int, number: int, tokens: int) -> pb.GenerateRequest:
    """Return a request whose prompt, of some 64 ids, no other one has."""
    words = " ".join(str(client * 7919 + number * 104729 + place) for place in range(12))
    asked = pb.GenerateRequest(text=f"Count on from {words}")
    asked.sampling.max_tokens = tokens
    asked.sampling.ignore_eos = True
    asked.sampling.seed = client
    return asked


async def stream(stub: "RouterServiceAsyncStub", asked: pb.GenerateRequest, tally: Tally) -> None:
    """Read one stream to its end."""
    began = time.monotonic()
    first = True
    async for message in stub.Generate(asked, timeout=TIMEOUT_S):
        count = len(message.delta.token_ids)
        if count and first:
            tally.first_token_s.append(time.monotonic() - began)
            first = False
        tally.tokens += count
        tally.messages += 1


async def drive(options: argparse.Namespace) -> dict[str, object]:
    """Run all clients; return what is printed."""
    tally = Tally()
    async with grpc.aio.insecure_channel(options.address) as channel:
        stub = RouterServiceStub(channel)
        await channel.channel_ready()

        async def client(name: int) -> None:
            for number in range(options.rounds):
                await stream(stub, request(name, number, options.tokens), tally)

        began = time.monotonic()
        async with asyncio.TaskGroup() as clients:
            for name in range(options.streams):
                clients.create_task(client(name))
        seconds = time.monotonic() - began
    return {
        "requests": options.streams * options.rounds,
        "tokens": tally.tokens,
        "messages": tally.messages,
        "seconds": seconds,
        "first_token_s": sorted(tally.first_token_s),
    }


def main() -> None:
    """Run the clients and print what they got."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    print(json.dumps(asyncio.run(drive(parser.parse_args()))))


if __name__ == "__main__":
    main()
