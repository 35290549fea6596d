"""A fork server and its ranks, from a blocking starter's side."""

import socket
import subprocess
import sys

import msgspec

from radixmesh.settings import child_environment
from worker.config import RankConfig
from worker.group.framing import HEADER, FrameSplitter
from worker.group.launch import Ended, Kill, Start, Started, decode_answer, descriptors


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
    """The fork server; `close` ends it as the end of a front does."""

    def __init__(self, engine: str, model_dir: str) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(10)
        self._splitter = FrameSplitter()
        self.ranks: dict[int, Forked] = {}
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "worker.group.forkserver"),
                    *(str(theirs.fileno()), engine, model_dir),
                ],
                env=child_environment(OPENBLAS_NUM_THREADS="1"),
                pass_fds=[theirs.fileno()],
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
