"""`radixmesh up`: a local mesh in the foreground until Ctrl-C. Knows the terminal."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixmesh.cli.mesh import Mesh, local_mesh
from radixmesh.cli.plan import UpSettings
from radixmesh.cli.processes import Say, ServiceFailed
from radixmesh.rpc.lifecycle import run_until_signal
from radixmesh.settings import load

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")


class Lines:
    """Shows lines of many processes, each with its name in front."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        """Show one line."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        # As Text: what processes say is no markup.
        self._console.print(
            Text.assemble((f"{name:<12}| ", colour), Text(line)), soft_wrap=True, highlight=False
        )


def addresses(mesh: Mesh) -> Table:
    """Return a short table of what listens where."""
    table = Table(title=f"radixmesh: {mesh.describe()['model']}", title_justify="left")
    table.add_column("what")
    table.add_column("address")
    table.add_column("pid", justify="right")
    facts = mesh.describe()
    table.add_row("OpenAI API", f"{facts['http']}/v1", str(mesh.children["router"].pid))
    table.add_row("gRPC", facts["grpc"], "")
    table.add_row("FleetService", facts["fleet"], "")
    table.add_row("metrics", facts["metrics"], "")
    for name, child in mesh.children.items():
        if name != "router":
            table.add_row(name, mesh.address(name), str(child.pid))
    return table


def up(argv: Sequence[str]) -> int:
    """Run a mesh until a signal; return the exit status."""
    settings = load(UpSettings, argv, prog="radixmesh up")
    console = Console(stderr=True)
    # Children's lines on stderr, the table on stdout: the one can be silenced without the other.
    shown = Console()

    async def main(stop: asyncio.Event) -> None:
        serving = asyncio.ensure_future(_serve(settings, Lines(console), shown))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        # A signal before it serves must not wait for that: the context ends all processes.
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    try:
        asyncio.run(run_until_signal(main))
    except ServiceFailed as failed:
        sys.stderr.write(f"radixmesh up: {failed}\n")
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    return 0


async def _serve(settings: UpSettings, say: Say, shown: Console) -> None:
    async with local_mesh(settings, say) as mesh:
        shown.print(addresses(mesh))
        await asyncio.Event().wait()
