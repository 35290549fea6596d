"""A fork server and its ranks, from a blocking starter's side."""

import socket
import subprocess
import sys
from typing import IO

import msgspec

from radixmesh.settings import child_environment
from tests.fakes.rank_threads import FrontEnd
from worker.config import FakeConfig, RankConfig
from worker.group.framing import HEADER, FrameSplitter
from worker.group.launch import Ended, Kill, Start, Started, decode_answer, descriptors
from worker.group.topology import Topology


class Forked:
    """A rank process that a fork server started."""

    def __init__(self, forks: "Forks", number: int) -> None:
        self._forks = forks
        self.number = number
        self.pid = 0
        self.status: int | None = None

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        while self.status is None:
            self._forks.hear()
        return self.status

    def kill(self) -> None:
        self._forks.order(Kill(self.number), [])


class Forks:
    """The fork server; `close` ends it as the end of a front does. `log`: where all is logged."""

    def __init__(self, base: RankConfig, log: IO[bytes] | None = None) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(10)
        self._splitter = FrameSplitter()
        self.ranks: dict[int, Forked] = {}
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "worker.group.forkserver"),
                    *(str(theirs.fileno()), msgspec.json.encode(base).decode()),
                ],
                env=child_environment(OPENBLAS_NUM_THREADS="1"),
                pass_fds=[theirs.fileno()],
                stderr=log,
            )

    def fork(self, config: RankConfig) -> Forked:
        """Start a rank and wait until it runs."""
        rank = Forked(self, len(self.ranks) + 1)
        self.ranks[rank.number] = rank
        self.order(Start(rank.number, config), descriptors(config))
        while not rank.pid:
            self.hear()
        return rank

    def order(self, order: Start | Kill, fds: list[int]) -> None:
        body = msgspec.json.encode(order)
        socket.send_fds(self._sock, [HEADER.pack(len(body))], fds)
        self._sock.sendall(body)

    def hear(self) -> None:
        """Wait for what the fork server says next."""
        data = self._sock.recv(1 << 16)
        assert data, "the fork server is gone"
        for body in self._splitter.feed(data):
            match decode_answer(body):
                case Started(number, pid):
                    self.ranks[number].pid = pid
                case Ended(number, status):
                    self.ranks[number].status = status

    def close(self) -> None:
        self._sock.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()


class ForkedRanks:
    """Processes of one replica and the front's end of it."""

    def __init__(self, forks: Forks, base: RankConfig, last_faults: tuple[str, ...] = ()) -> None:
        front, mailbox = socket.socketpair()
        topology = Topology(pp=base.pp, tp=base.tp)
        pairs = [socket.socketpair() for _ in range(topology.size - 1)]
        store = socket.create_server(("127.0.0.1", 0))
        self.front = FrontEnd(front)
        self.processes: list[Forked] = []
        local = base.carrier == "local"
        for number, place in enumerate(topology.replica(0)):
            ours = [one for one, _ in pairs] if number == 0 else [pairs[number - 1][1]]
            is_last = number and number == len(pairs)
            config = msgspec.structs.replace(
                base,
                fake=FakeConfig(faults=last_faults) if is_last and last_faults else base.fake,
                pp_rank=place.pp_rank,
                tp_rank=place.tp_rank,
                mailbox_fd=-1 if number else mailbox.fileno(),
                broadcast_fds=tuple(sock.fileno() for sock in ours) if local else (),
                store_fd=-1 if local or number else store.fileno(),
                store_port=0 if local else store.getsockname()[1],
            )
            self.processes.append(forks.fork(config))
        for sock in (mailbox, store, *(sock for pair in pairs for sock in pair)):
            sock.close()

    def close(self) -> list[int]:
        """End them as the end of a front does; return their statuses."""
        self.front.close()
        return [process.wait() for process in self.processes]
