"""Logs: one line an event, nothing from outside gets out of it."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.telemetry.logs import (
    JsonFormatter,
    TextFormatter,
    escape,
    new_request_id,
    request_id,
    setup_logging,
)

EVIL = "a\nINFO root forged\r\x1b[31m\x00\u202e\x85\u2028"


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "router.fleet"})
    vars(made).update(fields)
    return made


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_line_has_the_event_phrase_and_its_fields() -> None:
    made = record("group lost", group="g1", dp_rank=0, error="it is gone")
    made.created = 0.5
    line = TextFormatter("radixmesh-router").format(made)
    assert line == (
        "1970-01-01T00:00:00.500Z INFO radixmesh-router router.fleet group lost"
        " group=g1 dp_rank=0 error='it is gone'"
    )


@given(st.text(), st.text(min_size=1))
def test_whatever_a_message_or_field_holds_it_stays_one_printable_line(
    message: str, value: str
) -> None:
    made = record("%s %s", label=value)
    made.args = (message, EVIL)
    assert TextFormatter("s").format(made).isprintable()
    assert JsonFormatter("s").format(made).isprintable()


def test_a_traceback_cannot_forge_a_line() -> None:
    error = RuntimeError(EVIL)
    made = record("unexpected error")
    made.exc_info = (type(error), error, None)
    first, *rest = TextFormatter("s").format(made).split("\n")
    assert "unexpected error" in first
    assert rest
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)
    assert any("forged" in line for line in rest)


def test_json_lines_keep_types_and_survive_odd_values() -> None:
    entry = json.loads(JsonFormatter("s").format(record("event", count=3, thing=object(), t=EVIL)))
    assert entry["count"] == 3
    assert entry["t"] == EVIL
    assert entry["event"] == "event"
    assert entry["thing"].startswith("<object")


@given(st.text())
def test_escaping_keeps_printable_text_as_it_is(text: str) -> None:
    escaped = escape(text)
    assert escaped.isprintable()
    if text.isprintable():
        assert escaped == text


def test_the_request_id_of_the_call_is_a_field() -> None:
    token = request_id.set("r-17")
    try:
        assert TextFormatter("s").format(record("event")).endswith("event request_id=r-17")
    finally:
        request_id.reset(token)
    assert "request_id" not in TextFormatter("s").format(record("event"))


def test_a_sane_request_id_is_kept_and_any_other_replaced() -> None:
    assert new_request_id("r-17") == "r-17"
    for given_id in ("", "x" * 129, "a\nb", "größe"):
        made = new_request_id(given_id)
        assert made != given_id
        assert len(made) == 32


def test_set_up_sends_everything_to_one_stream_at_the_level(root: logging.Logger) -> None:
    stream = io.StringIO()
    for _ in range(2):
        setup_logging("radixmesh-worker", "warning", stream=stream)
    logging.getLogger("worker.x").info("quiet")
    logging.getLogger("worker.x").warning("loud", extra={"n": 1})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("WARNING radixmesh-worker worker.x loud n=1")


def test_json_set_up_writes_objects(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logging("s", "INFO", json=True, stream=stream)
    logging.getLogger("x").info("event", extra={"n": 1})
    assert json.loads(stream.getvalue())["n"] == 1


def test_an_unknown_level_is_refused(root: logging.Logger) -> None:
    with pytest.raises(ValueError, match="LOUD"):
        setup_logging("s", "loud")
