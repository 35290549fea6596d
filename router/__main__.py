"""`python -m router`, `radixmesh-router`: read the settings, run the router."""

import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.settings import RouterSettings

PROG = "radixmesh-router"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    # Until the service takes it, an interrupt ends this at once, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only then: these take their time.
    from radixmesh.rpc.lifecycle import lacking, start
    from radixmesh.settings import load
    from router.gateway import Refused, translate
    from router.settings import RouterSettings

    try:
        flags = translate(sys.argv[1:] if argv is None else argv)
    except Refused as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    settings = load(RouterSettings, flags, prog=PROG)
    if settings.processes > 1:
        return _many(flags, settings)
    # Only then: it takes most of a second.
    from router.app import serve

    number = settings.process_number
    title = f"groups={len(settings.groups)} policy={settings.policy}"
    try:
        return start(
            PROG if number is None else f"{PROG}-{number}",
            partial(serve, settings),
            title=title,
            log_level=settings.log_level,
            log_json=settings.log_json,
        )
    except ModuleNotFoundError as error:
        return lacking(PROG, error, _extra_with(error.name or ""))


def _many(flags: Sequence[str], settings: "RouterSettings") -> int:
    """Run several routers, each a process of its own."""
    from radixmesh.cli.processes import ServiceFailed
    from radixmesh.rpc.lifecycle import start
    from router.processes import supervise, to_stderr

    try:
        return start(
            PROG,
            partial(supervise, flags, settings, say=to_stderr),
            title=f"processes={settings.processes}",
            log_level=settings.log_level,
            log_json=settings.log_json,
        )
    except ServiceFailed as failed:
        sys.stderr.write(f"{PROG}: {failed}\n")
        return 1


def _extra_with(module: str) -> str:
    """Return the extra of the installation that brings a module."""
    return "kubernetes" if module in {"kubernetes_asyncio", "aiohttp"} else "http"


if __name__ == "__main__":
    sys.exit(main())
