"""What rank (0, 0) tells all ranks of its replica before each step, and its encoding.

Everything that a plan depends on is in these records or follows from them. No pickle.
"""

from typing import Final

import msgspec

from worker.request import Inbound


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """The inputs of one step.

    Attributes:
        step: Number of the step, from 0, without gaps.
        now_us: Rank (0, 0)'s clock; the only clock that a plan knows.
        digest: Rank (0, 0)'s rolling digest after the step before.
        inputs: Requests, cancels and flushes, in the order in which they take effect.
    """

    step: int
    now_us: int
    digest: int
    inputs: list[Inbound]


_DECODER: Final = msgspec.msgpack.Decoder(StepRecord)


def encode_record(record: StepRecord) -> bytes:
    """Return the record as bytes."""
    return msgspec.msgpack.encode(record)


def decode_record(raw: bytes) -> StepRecord:
    """Read a record.

    Raises:
        msgspec.ValidationError: It is none.
    """
    return _DECODER.decode(raw)
