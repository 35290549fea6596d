"""The `radixmesh` command: names, options and exit codes. Everything else is in the modules here.

`up` and `demo` take the flags of `UpSettings`, like a service; the others talk to a mesh.
Each command imports what it needs: the process that `up` forks from must not hold gRPC.
"""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from radixmesh import __version__
from radixmesh.errors import MeshError

if TYPE_CHECKING:
    from radixmesh.cli.chat import Writer

__all__ = ["app", "main"]

app = typer.Typer(
    help="An inference mesh for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Address = Annotated[str, typer.Option(help="host:port; empty: on this machine, by --port-base.")]
PortBase = Annotated[int, typer.Option(help="The port base of a local mesh.")]
ApiKey = Annotated[str, typer.Option(envvar="RADIXMESH_API_KEY", help="The mesh's API key.")]
ModelName = Annotated[str, typer.Option(help="A served model; empty: the only one.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PromptText = Annotated[str, typer.Argument(help="The text; - reads it from standard input.")]
DEFAULT_PORT_BASE = 30000


def main() -> None:
    """Run the command line."""
    app(prog_name="radixmesh")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print it.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("up", context_settings=_PASSED_ON, add_help_option=False)
def _up(context: typer.Context) -> None:
    """Run a local mesh of separate processes; --help lists its flags."""
    from radixmesh.cli.up import up

    raise typer.Exit(up(context.args))


@app.command("demo", context_settings=_PASSED_ON, add_help_option=False)
def _demo(context: typer.Context) -> None:
    """Show a mesh at work on free ports, then end it; takes the flags of `up`."""
    from radixmesh.cli.demo import demo

    raise typer.Exit(demo(context.args))


@app.command("generate")
def _generate(  # noqa: PLR0913 - each is an option
    prompt: PromptText,
    address: Address = "",
    port_base: PortBase = DEFAULT_PORT_BASE,
    api_key: ApiKey = "",
    model: ModelName = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streamed."""
    from radixmesh.cli.chat import write_answer
    from radixmesh.cli.show import as_json as to_json
    from radixmesh.client import Client, Sampling

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    with reported(), Client(address or _local(port_base + 1), api_key=api_key) as client:
        if as_json:
            print(to_json(client.complete(text, model=model, sampling=sampling)))
        else:
            write_answer(client.generate(text, model=model, sampling=sampling), _writer())


@app.command("chat")
def _chat(
    address: Address = "",
    port_base: PortBase = DEFAULT_PORT_BASE,
    api_key: ApiKey = "",
    model: ModelName = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> None:
    """Talk to a model; Ctrl-C stops an answer, /reset forgets, /exit or Ctrl-D leaves."""
    from radixmesh.cli.chat import Chat
    from radixmesh.client import Client, Options, Sampling

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    options = Options(model=model, sampling=sampling)
    with reported(), Client(address or _local(port_base + 1), api_key=api_key) as client:
        Chat(client, options, _writer()).run(_turns())


@app.command("models")
def _models(
    address: Address = "",
    port_base: PortBase = DEFAULT_PORT_BASE,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """List what a mesh serves."""
    from radixmesh.cli.show import as_json as to_json
    from radixmesh.cli.show import models_table
    from radixmesh.client import Client

    with reported(), Client(address or _local(port_base + 1), api_key=api_key) as client:
        models = client.list_models()
    _out(to_json(models) if as_json else models_table(models))


@app.command("fleet")
def _fleet(
    address: Address = "", port_base: PortBase = DEFAULT_PORT_BASE, as_json: AsJson = False
) -> None:
    """List replicas: state, load, blocks, hit rate. --address is that of FleetService."""
    from radixmesh.cli.show import as_json as to_json
    from radixmesh.cli.show import replicas_table
    from radixmesh.client import FleetClient

    with reported(), FleetClient(address or _local(port_base + 3)) as client:
        replicas = client.list_replicas()
    _out(to_json(replicas) if as_json else replicas_table(replicas))


@app.command("explain")
def _explain(
    prompt: PromptText,
    address: Address = "",
    port_base: PortBase = DEFAULT_PORT_BASE,
    model: ModelName = "",
    as_json: AsJson = False,
) -> None:
    """Price a text against every replica without sending it. --address is FleetService's."""
    from radixmesh.cli.show import as_json as to_json
    from radixmesh.cli.show import explanation_table
    from radixmesh.client import FleetClient

    text = sys.stdin.read() if prompt == "-" else prompt
    with reported(), FleetClient(address or _local(port_base + 3)) as client:
        explanation = client.explain_route(text, model=model)
    _out(to_json(explanation) if as_json else explanation_table(explanation))


@contextmanager
def reported() -> Generator[None, None, None]:
    """End with status 1 and one line on stderr when the mesh refuses or is not there."""
    try:
        yield
    except MeshError as error:
        sys.stderr.write(f"radixmesh: {error.message} [{error.reason}: {error.advice}]\n")
        raise typer.Exit(1) from error


def _local(port: int) -> str:
    return f"127.0.0.1:{port}"


def _out(what: object) -> None:
    Console().print(what, markup=False, highlight=False)


def _turns() -> Iterator[str]:
    console = Console()
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _writer() -> "Writer":
    from radixmesh.cli.chat import Writer
    from radixmesh.cli.show import harmless

    notes = Console(stderr=True)
    people_read = sys.stdout.isatty()

    def text(words: str) -> None:
        sys.stdout.write(harmless(words) if people_read else words)
        sys.stdout.flush()

    return Writer(text, lambda note: notes.print(note, style="dim", markup=False, highlight=False))


if __name__ == "__main__":
    main()
