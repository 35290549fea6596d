"""A rank that is told to writes its stacks and its state to the log, and goes on."""

import re
import subprocess
import sys

from tests.fakes.replica import FakeReplica, add

RANK = """
import logging, signal, sys
from worker.group.watchdog import DUMP_SIGNAL, dump_on_signal

def waits_for_a_record():
    signal.raise_signal(DUMP_SIGNAL)

logging.basicConfig(format="%(message)s %(state)s")
dump_on_signal("starting")
dump_on_signal(["step", 7])
waits_for_a_record()
print("went on")
"""


def test_a_rank_that_is_given_up_says_where_it_is_and_how_far_it_had_come() -> None:
    rank = subprocess.run(
        [sys.executable, "-c", RANK], capture_output=True, text=True, check=True, timeout=10
    )
    assert rank.stdout == "went on\n"
    assert "in waits_for_a_record" in rank.stderr
    assert "rank is given up ['step', 7]" in rank.stderr
    assert "starting" not in rank.stderr


def test_the_state_of_a_rank_tells_what_it_decided_last() -> None:
    replica = FakeReplica()
    replica.turn(add(7, [3, 4, 5]))
    replica.turn()
    prefill, decode = re.findall(r"(\d+) [0-9a-f]{16} (\[\(7.*?\)\])", repr(replica.turns))
    assert prefill == ("0", "[(7, 0, 3)]")
    assert decode == ("1", "[(7, 3, 1)]")
