"""`python -m tokenizer_svc tokenizer|detokenizer`: read the flags and run one of the services."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from radixmesh.errors import InvalidRequest
from radixmesh.rpc.lifecycle import start
from radixmesh.settings import load
from tokenizer_svc.app import serve_detokenizer, serve_tokenizer, served_name
from tokenizer_svc.settings import DetokenizerSettings, TokenizerSettings

Settings = TypeVar("Settings", TokenizerSettings, DetokenizerSettings)


def tokenizer_main(argv: Sequence[str] | None = None) -> int:
    """Run the tokenizer; return the exit status."""
    return _run("radixmesh-tokenizer", TokenizerSettings, serve_tokenizer, argv)


def detokenizer_main(argv: Sequence[str] | None = None) -> int:
    """Run the detokenizer; return the exit status."""
    return _run("radixmesh-detokenizer", DetokenizerSettings, serve_detokenizer, argv)


def _run(
    prog: str,
    kind: type[Settings],
    serve: Callable[[Settings, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None,
) -> int:
    settings = load(kind, sys.argv[1:] if argv is None else argv, prog=prog)
    try:
        return start(
            prog,
            partial(serve, settings),
            title=served_name(settings),
            log_level=settings.log_level,
            log_json=settings.log_json,
        )
    except InvalidRequest as error:
        sys.stderr.write(f"{prog}: --model: {error.message}\n")
        return 2


def main(argv: Sequence[str]) -> int:
    """Run the service that the first argument names."""
    services = {"tokenizer": tokenizer_main, "detokenizer": detokenizer_main}
    if not argv or argv[0] not in services:
        sys.stderr.write("usage: python -m tokenizer_svc tokenizer|detokenizer --model DIR ...\n")
        return 2
    return services[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
