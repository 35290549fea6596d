"""How a service process lives: title, logs, signals. Knows nothing of what it serves."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

import setproctitle

from radixmesh.telemetry.logs import setup_logging

__all__ = ["lacking", "run_until_signal", "set_title", "start"]

logger = logging.getLogger(__name__)

Main = Callable[[asyncio.Event], Awaitable[None]]


def set_title(title: str) -> None:
    """Set the process title that `ps` shows; it begins with the service's name."""
    setproctitle.setproctitle(title)


async def run_until_signal(main: Main) -> None:
    """Run `main(stop)`; SIGTERM or SIGINT sets `stop`, a second one cancels `main`.

    Raises:
        asyncio.CancelledError: A second signal came.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("second signal, leaving at once", extra={"signal": number.name})
            if task:
                task.cancel()
            return
        logger.info("stopping", extra={"signal": number.name})
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await main(stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def lacking(service: str, error: ModuleNotFoundError, extra: str) -> int:
    """Say which extra of the installation a service lacks; return its exit status."""
    sys.stderr.write(f"{service}: needs {error.name}; run: pip install 'radixmesh[{extra}]'\n")
    return 2


def start(
    service: str, main: Main, *, title: str = "", log_level: str = "INFO", log_json: bool = False
) -> int:
    """Run a service process from its `__main__`; return the exit status.

    Args:
        service: `radixmesh-router` and so on; begins the title and names the logs.
        main: The composition root; returns when `stop` is set and all is down.
        title: What follows the service's name in the process title.
        log_level: Of all loggers.
        log_json: One JSON object a line, instead of text.
    """
    setup_logging(service, log_level, json=log_json)
    set_title(f"{service} {title}".strip())
    try:
        asyncio.run(run_until_signal(main))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 1
    except OSError as error:
        logger.error("cannot start", extra={"error": str(error)})  # noqa: TRY400 - says it all
        return 1
    return 0
