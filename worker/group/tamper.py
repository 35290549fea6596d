"""Acts out scripted faults of a rank's records: what it was told is not what the others were.

For tests of the comparison of plans, with the fake engine only. See `engine/faults.py`.
"""

from collections.abc import Sequence

import msgspec

from radixmesh.blocks import ID_BYTES
from worker.config import RankConfig
from worker.engine.faults import RECORD_KINDS, Fault, parse_faults
from worker.group.rank import Tamper, untouched
from worker.group.record import StepRecord
from worker.request import Add, Inbound


def make_tamper(config: RankConfig) -> Tamper:
    """Return what happens to this rank's records.

    Raises:
        InvalidRequest: A script can't be read.
    """
    if config.engine != "fake":
        return untouched
    faults = [
        fault for fault in parse_faults(config.fake.faults, config) if fault.kind in RECORD_KINDS
    ]
    return _Tampering(faults) if faults else untouched


class _Tampering:
    """Counts requests as they come and spoils the chosen ones."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._steps = {fault.number for fault in faults if fault.on == "step"}
        self._kinds = {fault.number: fault.kind for fault in faults if fault.on == "request"}
        self._count = 0
        self._held: Add | None = None

    def __call__(self, record: StepRecord) -> StepRecord | None:
        if record.step in self._steps:
            return None
        inputs: list[Inbound] = []
        for item in record.inputs:
            if isinstance(item, Add):
                inputs += self._spoil(item)
            else:
                inputs.append(item)
        return msgspec.structs.replace(record, inputs=inputs)

    def _spoil(self, add: Add) -> list[Inbound]:
        self._count += 1
        kind = self._kinds.get(self._count)
        if kind == "reorder":
            self._held = add
            return []
        spoilt: list[Inbound] = [add]
        if kind == "drop":
            spoilt = []
        elif kind == "alter":
            last = add.prompt[-ID_BYTES:]
            other = bytes([last[0] ^ 1]) + last[1:]
            spoilt = [msgspec.structs.replace(add, prompt=add.prompt[:-ID_BYTES] + other)]
        if self._held is not None:
            spoilt.append(self._held)
            self._held = None
        return spoilt
