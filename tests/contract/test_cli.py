"""The `radixmesh` command against a router's services: what it prints and how it ends."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from radixmesh.cli.chat import Chat, Writer
from radixmesh.cli.main import app
from radixmesh.client import Client, Options
from radixmesh.errors import PromptTooLong
from radixmesh.router.v1 import fleet_service_pb2
from tests.fakes.router_service import FakeRouter, Step, delta, finish, serving

ANSWER: Sequence[Step] = (delta("Hel", 1), delta("lo", 2), finish())


async def run(router: FakeRouter, *command: str, stdin: str = "") -> Result:
    async with serving(router) as address:
        command = (*command, f"--address={address}")
        runner = CliRunner(env={"COLUMNS": "200"})
        return await asyncio.to_thread(runner.invoke, app, command, input=stdin)


async def test_generate_writes_the_text_as_it_comes() -> None:
    router = FakeRouter([ANSWER])
    result = await run(router, "generate", "hi", "--max-tokens=5", "--temperature=0")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert "4/9 prompt tokens reused" in result.stderr
    assert router.requests[0].sampling.max_tokens == 5
    assert router.requests[0].sampling.HasField("temperature")


async def test_generate_reads_a_text_from_standard_input() -> None:
    router = FakeRouter([ANSWER])
    await run(router, "generate", "-", stdin="from a pipe")
    assert router.requests[0].text == "from a pipe"


async def test_generate_prints_json_on_demand() -> None:
    result = await run(FakeRouter([ANSWER]), "generate", "hi", "--json")
    output = json.loads(result.stdout)["outputs"][0]
    assert (output["text"], output["finish_reason"]) == ("Hello", "length")


async def test_a_refusal_is_one_line_and_a_status() -> None:
    result = await run(FakeRouter([[PromptTooLong("too long")]]), "generate", "hi")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "radixmesh: too long [PROMPT_TOO_LONG: shorten the prompt or ask for fewer tokens]"
    ]


async def test_the_fleet_is_a_table_or_json() -> None:
    table = await run(FakeRouter(), "fleet")
    listed = await run(FakeRouter(), "fleet", "--json")
    assert "g0/1" in table.stdout
    assert json.loads(listed.stdout)[0]["view"] == "exact"


async def test_prices_are_a_table_or_json() -> None:
    router = FakeRouter()
    table = await run(router, "explain", "hi")
    priced = await run(FakeRouter(), "explain", "hi", "--json")
    assert "7 tokens, policy price" in table.stdout
    assert json.loads(priced.stdout)["candidates"][0]["total_s"] == 0.5
    assert router.requests[0].request.text == "hi"


async def test_models_are_listed() -> None:
    result = await run(FakeRouter(), "models", "--json")
    assert json.loads(result.stdout)[0]["name"] == "tiny"


async def test_a_chat_sends_the_conversation_so_far() -> None:
    router = FakeRouter([ANSWER])
    result = await run(router, "chat", stdin="one\n\ntwo\n/reset\nthree\n/exit\nnever\n")
    assert result.exit_code == 0
    said = [[turn.content for turn in request.chat.messages] for request in router.requests]
    assert said == [["one"], ["one", "Hello", "two"], ["three"]]


async def test_a_failed_turn_is_not_remembered() -> None:
    router = FakeRouter([[PromptTooLong("too long")], ANSWER])
    async with serving(router) as address:
        with Client(address) as client:
            heard: list[str] = []
            chat = Chat(client, Options(), Writer(heard.append, heard.append))
            with pytest.raises(PromptTooLong):
                await asyncio.to_thread(chat.answer, "one")
            await asyncio.to_thread(chat.answer, "two")
    assert [turn.content for turn in chat.history] == ["two", "Hello"]


async def test_ctrl_c_stops_an_answer_and_not_the_conversation() -> None:
    router = FakeRouter([ANSWER])
    notes: list[str] = []
    heard: list[str] = []

    def interrupted_once(words: str) -> None:
        heard.append(words)
        if heard == ["Hel"]:
            raise KeyboardInterrupt

    async with serving(router) as address:
        with Client(address) as client:
            chat = Chat(client, Options(), Writer(interrupted_once, notes.append))
            await asyncio.to_thread(chat.run, iter(["one", "two"]))
    assert "".join(heard).startswith("Hel\nHello")
    assert notes[0] == "stopped; this turn is forgotten"
    assert [turn.content for turn in chat.history] == ["two", "Hello"]


@pytest.mark.parametrize("hostile", ["[bold]x[/bold]", "[/nothing]"])
async def test_what_a_mesh_says_is_no_markup(hostile: str) -> None:
    class Hostile(FakeRouter):
        async def ListReplicas(self, request: Any, context: Any) -> Any:  # noqa: N802
            replica = fleet_service_pb2.Replica(group_id=hostile)
            return fleet_service_pb2.ListReplicasResponse(replicas=[replica])

    result = await run(Hostile(), "fleet")
    assert result.exit_code == 0
    assert hostile in result.stdout


def test_a_wrong_flag_of_up_is_named() -> None:
    result = CliRunner().invoke(app, ["up", "--groups=0"])
    assert result.exit_code == 2
    assert "--groups" in result.stderr
