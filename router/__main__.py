"""`python -m router`, `radixmesh-router`: read the settings, run the router."""

import signal
import sys
from collections.abc import Sequence
from functools import partial

PROG = "radixmesh-router"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    # Until the service takes it, an interrupt ends this at once, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only then: these take the better part of a second.
    from radixmesh.rpc.lifecycle import lacking, start
    from radixmesh.settings import load
    from router.app import serve
    from router.gateway import Refused, translate
    from router.settings import RouterSettings

    try:
        flags = translate(sys.argv[1:] if argv is None else argv)
    except Refused as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    settings = load(RouterSettings, flags, prog=PROG)
    title = f"groups={len(settings.groups)} policy={settings.policy}"
    try:
        return start(
            PROG,
            partial(serve, settings),
            title=title,
            log_level=settings.log_level,
            log_json=settings.log_json,
        )
    except ModuleNotFoundError as error:
        return lacking(PROG, error, _extra_with(error.name or ""))


def _extra_with(module: str) -> str:
    """Return the extra of the installation that brings a module."""
    return "kubernetes" if module in {"kubernetes_asyncio", "aiohttp"} else "http"


if __name__ == "__main__":
    sys.exit(main())
