"""Logs: an event phrase plus fields, one line each, safe to print. Knows no service.

`logger.info("group lost", extra={"group": name})` renders as
`2026-01-02T03:04:05.678Z INFO router.fleet group lost group=g1`. Whatever came from
outside is escaped: no message, field or traceback can forge a line or drive a
terminal.
"""

import datetime
import json as json_module
import logging
import sys
import uuid
from contextvars import ContextVar
from typing import Any, Final, TextIO

__all__ = [
    "JsonFormatter",
    "TextFormatter",
    "escape",
    "new_request_id",
    "request_id",
    "setup_logging",
]

# The call that the current task serves; empty outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_MAX_REQUEST_ID: Final = 128
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def escape(text: str) -> str:
    """Return text with control, format and other unprintable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def new_request_id(given: str = "") -> str:
    """Return the caller's request id where it is a sane label, else a new one."""
    if given and len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    current = request_id.get()
    if current:
        fields.setdefault("request_id", current)
    return fields


def _instant(record: logging.LogRecord) -> str:
    instant = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """One line for people; a traceback's lines follow behind a bar."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        head = f"{_instant(record)} {record.levelname} {self._service} {record.name}"
        fields = "".join(f" {key}={_quote(value)}" for key, value in _fields(record).items())
        line = escape(f"{head} {record.getMessage()}{fields}")
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    | {escape(part)}" for part in trace.split("\n"))
        return line


def _quote(value: object) -> str:
    text = str(value)
    return repr(text) if not text or " " in text or "=" in text else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII only."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        entry: dict[str, Any] = {
            "time": _instant(record),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(entry, default=str)


def setup_logging(
    service: str, level: str = "INFO", json: bool = False, *, stream: TextIO | None = None
) -> None:
    """Send all logs of this process to `stream` (standard error), in one form.

    Raises:
        ValueError: There is no such level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if json else TextFormatter(service))
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
