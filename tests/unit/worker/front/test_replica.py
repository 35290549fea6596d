"""What the front keeps of a replica: dispatches that the last report does not know of count."""

import msgspec

from radixmesh.errors import MeshError
from tests.fakes.jobs import Nobody, job, step
from worker.front.dispatch import Candidate
from worker.front.jobs import Job
from worker.front.replica import Hold, Replica, ReplicaState
from worker.request import Add, Cancel, Inbound, LoadReport, Sampling


class Sent:
    """A channel that remembers."""

    def __init__(self) -> None:
        self.messages: list[Inbound] = []

    def send(self, message: Inbound) -> None:
        self.messages.append(message)


class Listening(Nobody):
    """An owner that remembers what a load report knows of."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_seen(self, dp_rank: int, entry_id: int) -> None:
        self.seen.append(entry_id)


def begun() -> tuple[Replica, Sent, list[MeshError]]:
    replica, sent = Replica(0), Sent()
    broken: list[MeshError] = []
    replica.begin(1, sent, broken.append)
    replica.set_up(free_blocks=9)
    return replica, sent, broken


def dispatch(replica: Replica, request_id: int, tokens: int, owner: Nobody) -> Job:
    made = job(request_id, owner)
    made.uncached_tokens = tokens
    add = Add(request_id, b"", b"", Sampling(seed=1), b"")
    replica.dispatch(made, add)
    return made


def report(replica: Replica, load: LoadReport) -> None:
    replica.absorb(msgspec.structs.replace(step([]), load=load))


def test_a_report_takes_only_those_dispatches_off_that_it_knows_of() -> None:
    replica, _, _ = begun()
    owner = Listening()
    for request_id, tokens in ((1, 100), (2, 20), (3, 3)):
        dispatch(replica, request_id, tokens, owner)
    assert replica.candidate == Candidate(0, 123, 3)
    report(replica, LoadReport(1, 0, 90, 5, 0.0, 0.0, last_request_id=1))
    assert replica.candidate == Candidate(0, 90 + 23, 1 + 2)
    assert owner.seen == [1001]
    report(replica, LoadReport(3, 0, 0, 5, 0.0, 0.0, last_request_id=3))
    assert replica.candidate == Candidate(0, 0, 3)
    assert owner.seen == [1001, 1002, 1003]


def test_a_withdrawn_job_is_cancelled_once() -> None:
    replica, sent, _ = begun()
    held = dispatch(replica, 1, 5, Nobody())
    replica.withdraw([held])
    replica.withdraw([held])
    assert [each for each in sent.messages if isinstance(each, Cancel)] == [Cancel([1])]


def test_a_lost_replica_gives_its_jobs_back_and_forgets_its_load() -> None:
    replica, _, _ = begun()
    held = [dispatch(replica, number, 5, Nobody()) for number in (1, 2)]
    assert replica.lose() == held
    assert replica.state is ReplicaState.DOWN
    assert replica.candidate == Candidate(0, 0, 0)
    assert not replica.jobs


def test_draining_outlives_a_restart_and_silence_does_not() -> None:
    replica, sent, _ = begun()
    replica.holds |= {Hold.SILENT, Hold.DRAINED}
    replica.lose()
    replica.begin(2, sent, lambda _: None)
    replica.set_up(free_blocks=9)
    assert replica.state is ReplicaState.DRAINING
    assert replica.holds == {Hold.DRAINED}
