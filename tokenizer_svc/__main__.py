"""`python -m tokenizer_svc tokenizer|detokenizer`: read the flags and run one of the services."""

import signal
import sys
from collections.abc import Sequence
from functools import partial


def tokenizer_main(argv: Sequence[str] | None = None) -> int:
    """Run the tokenizer; return the exit status."""
    return _run("tokenizer", sys.argv[1:] if argv is None else argv)


def detokenizer_main(argv: Sequence[str] | None = None) -> int:
    """Run the detokenizer; return the exit status."""
    return _run("detokenizer", sys.argv[1:] if argv is None else argv)


def _run(role: str, argv: Sequence[str]) -> int:
    # Until the service takes it, an interrupt ends this at once, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only then: these take the better part of a second.
    from radixmesh.errors import InvalidRequest
    from radixmesh.rpc.lifecycle import lacking, start
    from radixmesh.settings import load
    from tokenizer_svc.settings import DetokenizerSettings, TokenizerSettings

    prog = f"radixmesh-{role}"
    settings: TokenizerSettings | DetokenizerSettings
    if role == "tokenizer":
        settings = load(TokenizerSettings, argv, prog=prog)
    else:
        settings = load(DetokenizerSettings, argv, prog=prog)
    try:
        # Only here: the `tokenizer` extra may not be installed.
        from tokenizer_svc.app import serve_detokenizer, serve_tokenizer, served_name
    except ModuleNotFoundError as error:
        return lacking(prog, error, "tokenizer")
    try:
        return start(
            prog,
            partial(serve_tokenizer, settings)
            if isinstance(settings, TokenizerSettings)
            else partial(serve_detokenizer, settings),
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
