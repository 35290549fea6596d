"""Scripted faults of the fake engine, so that failures can be tested at will.

A fault is `kind@condition`, optionally followed by `:name=number` parts that
choose ranks, for example `exit@step=20`, `desync@step=5:tp=1` or
`exit@prompt-contains=17`. Knows no sockets.

Kinds that happen in the engine: `exit` (the process ends at once), `hang` (the
step never ends), `raise` (the engine raises), `desync` (this rank draws other
ids than its peers). Conditions: `step=N` (the first step from N on that computes
something), `prompt-contains=ID` (a row with this id).

Kinds that happen when weights are read: `refuse@weights=N` (the N-th time, counted from
1, they can't be) and `delay@weights=MS` (each time takes so many milliseconds more).

Kinds that happen to this rank's copy of what rank (0, 0) tells: `drop`, `alter`,
`reorder` (the N-th request of the replica is missing, has another id at its end, or
stands where the one after it should) with the condition `request=N`, counted from 1,
and `skip` (the step's record is missing) with `step=N`. Rank (0, 0) has no copy.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from radixmesh.errors import InvalidRequest
from worker.config import RankConfig
from worker.engine.engine import StepPlan

RECORD_KINDS: Final = frozenset(("drop", "alter", "reorder", "skip"))
_ON: Final = {
    **dict.fromkeys(("drop", "alter", "reorder"), "request"),
    **dict.fromkeys(("refuse", "delay"), "weights"),
    "skip": "step",
}
_SYNTAX: Final = re.compile(
    r"((?P<engine>exit|hang|raise|desync)@(?P<on>step|prompt-contains)="
    r"|(?P<record>drop|alter|reorder)@request=|(?P<skip>skip)@step="
    r"|(?P<reading>refuse|delay)@weights=)(?P<number>\d+)"
    r"(?P<ranks>(:(dp|pp|tp)=\d+)*)"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault that concerns this rank."""

    kind: str
    on: str
    number: int

    def due(self, plan: StepPlan) -> bool:
        """Whether this plan provokes it."""
        if self.on == "step":
            return plan.step >= self.number
        return self.on == "prompt-contains" and any(self.number in row.ids for row in plan.rows)


def parse_faults(scripts: Iterable[str], config: RankConfig) -> list[Fault]:
    """Return the faults that concern this rank, of the engine and of its records alike.

    Raises:
        InvalidRequest: A script is not written as above.
    """
    here = {"dp": config.dp_rank, "pp": config.pp_rank, "tp": config.tp_rank}
    faults = []
    for script in scripts:
        match = _SYNTAX.fullmatch(script.strip())
        if match is None:
            raise InvalidRequest(
                f"--fake-faults: {script!r} is not kind@step=N or kind@prompt-contains=ID with "
                "kind one of exit, hang, raise, desync; nor skip@step=N; nor kind@request=N "
                "with kind one of drop, alter, reorder; nor refuse@weights=N or delay@weights=MS",
                field="fake_faults",
            )
        wanted = [part.split("=") for part in match["ranks"].split(":") if part]
        if all(here[name] == int(number) for name, number in wanted):
            kind = match["engine"] or match["record"] or match["skip"] or match["reading"]
            on = match["on"] or _ON[kind]
            faults.append(Fault(kind, on, int(match["number"])))
    return faults
