"""Scripted faults of the fake engine, so that failures can be tested at will.

A fault is `kind@condition`, optionally followed by `:name=number` parts that
choose ranks, for example `exit@step=20`, `desync@step=5:tp=1` or
`exit@prompt-contains=17`. Kinds: `exit` (the process ends at once), `hang` (the
step never ends), `raise` (the engine raises), `desync` (this rank draws other
ids than its peers). Conditions: `step=N` (the first step from N on that computes
something), `prompt-contains=ID` (a row with this id). Knows no sockets.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from radixmesh.errors import InvalidRequest
from worker.config import RankConfig
from worker.engine.engine import StepPlan

KINDS: Final = ("exit", "hang", "raise", "desync")
_SYNTAX: Final = re.compile(
    r"(?P<kind>exit|hang|raise|desync)@(?P<on>step|prompt-contains)=(?P<number>\d+)"
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
        return any(self.number in row.ids for row in plan.rows)


def parse_faults(scripts: Iterable[str], config: RankConfig) -> list[Fault]:
    """Return the faults that concern this rank.

    Raises:
        InvalidRequest: A script is not written as above.
    """
    here = {"dp": config.dp_rank, "pp": config.pp_rank, "tp": config.tp_rank}
    faults = []
    for script in scripts:
        match = _SYNTAX.fullmatch(script.strip())
        if match is None:
            raise InvalidRequest(
                f"--fake-faults: {script!r} is not kind@step=N or kind@prompt-contains=ID, with "
                f"kind one of {', '.join(KINDS)}",
                field="fake_faults",
            )
        wanted = [part.split("=") for part in match["ranks"].split(":") if part]
        if all(here[name] == int(number) for name, number in wanted):
            faults.append(Fault(match["kind"], match["on"], int(match["number"])))
    return faults
