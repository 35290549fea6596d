"""Links over a real channel: requests, failures, cancels, deadlines, reconnects."""

import asyncio

from tests.fakes.echo_link import EchoService, ask, dial, serve_echo


async def test_many_requests_share_one_link_and_each_gets_its_own_answer() -> None:
    service = EchoService()
    async with (
        serve_echo(service) as server,
        dial(f"127.0.0.1:{server.port}") as (link, listener),
    ):
        answers = [ask(link, f"text {n}") for n in range(500)]
        texts = await asyncio.gather(*(answer.get() for answer in answers))
        assert texts == [f"text {n}".encode() for n in range(500)]
        assert listener.infos == 1
        assert not link.entries
        assert service.handlers[0].session.entry_count == 0
