"""The error table: every reason, there and back, over a link item and over a status."""

import logging

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.common.v1 import error_reason_pb2, link_pb2
from radixmesh.errors import BY_REASON, BadSampling, InternalError, MeshError, QueueFull
from radixmesh.rpc.status import DOMAIN, conceal, from_failure, from_status, to_failure, to_status

PREFIX = "ERROR_REASON_"
KINDS = sorted(BY_REASON.values(), key=lambda kind: kind.reason)


def seen(error: MeshError) -> tuple[object, ...]:
    return (type(error), error.message, error.field, error.metadata, error.retry_after_s)


def test_every_reason_of_the_contract_has_a_class_and_every_class_a_reason() -> None:
    names = {
        name.removeprefix(PREFIX) for name in error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name
    }
    assert names - {"UNSPECIFIED"} == set(BY_REASON)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_link(kind: type[MeshError]) -> None:
    error = kind("what happened", field="sampling.top_p", retry_after_s=0.25, limit=7)
    raw = to_failure(42, error).SerializeToString()
    failure = link_pb2.Failure.FromString(raw)
    assert failure.entry_id == 42
    assert seen(from_failure(failure)) == seen(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_status(kind: type[MeshError]) -> None:
    error = kind("what happened", field="sampling.top_p", retry_after_s=0.25, limit=7)
    raw = to_status(error).SerializeToString()
    assert seen(from_status(status_pb2.Status.FromString(raw))) == seen(error)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_survive_as_well(kind: type[MeshError]) -> None:
    error = kind("plain")
    assert seen(from_status(to_status(error))) == seen(error)
    assert seen(from_failure(to_failure(1, error))) == seen(error)


def test_details_say_what_the_contract_promises() -> None:
    status = to_status(BadSampling("top_p is 3", field="sampling.top_p", limit=1))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "BAD_SAMPLING",
        DOMAIN,
        {"limit": "1"},
    )
    assert bad.field_violations[0].field == "sampling.top_p"
    retry = error_details_pb2.RetryInfo()
    assert to_status(QueueFull("full", retry_after_s=0.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 500


def test_a_reason_from_the_future_is_an_internal_error() -> None:
    assert type(from_failure(link_pb2.Failure(reason=9999, message="new"))) is InternalError  # type: ignore[arg-type]
    assert type(from_failure(link_pb2.Failure())) is InternalError


def test_anothers_reason_is_not_taken_for_ours() -> None:
    status = status_pb2.Status(code=14, message="elsewhere")
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="example.com")
    )
    assert from_status(status).reason == "SERVICE_UNAVAILABLE"


BARE = {
    1: "CANCELLED",
    2: "INTERNAL",
    3: "INVALID_REQUEST",
    4: "DEADLINE_EXCEEDED",
    8: "QUEUE_FULL",
    12: "NOT_SUPPORTED",
    14: "SERVICE_UNAVAILABLE",
    77: "INTERNAL",
}


@pytest.mark.parametrize(("code", "reason"), BARE.items())
def test_a_bare_status_is_read_by_its_code(code: int, reason: str) -> None:
    assert from_status(status_pb2.Status(code=code, message="x")).reason == reason


@given(st.text(), st.text(), st.dictionaries(st.text(), st.text(), max_size=20))
def test_any_text_fits_into_headers(message: str, field: str, metadata: dict[str, str]) -> None:
    error = InternalError(message * 50, field=field * 50)
    error.metadata = {key * 50: value * 50 for key, value in metadata.items()}
    assert len(to_status(error).SerializeToString()) < 4096
    assert to_failure(1, error).ByteSize() < 4096


def test_a_lone_surrogate_does_not_break_the_status() -> None:
    error = InternalError("bad \ud800 text", field="\udfff", note="\ud800")
    assert from_status(to_status(error)).message == "bad ? text"
    assert from_failure(to_failure(1, error)).field == "?"


def test_a_concealed_error_shows_its_id_and_logs_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        hidden = conceal(RuntimeError("the password is 1234"), "testing")
    assert "1234" not in hidden.message
    record = caplog.records[0]
    assert vars(record)["error_id"] == hidden.metadata["error_id"]
    assert hidden.metadata["error_id"] in hidden.message
    assert record.exc_info
