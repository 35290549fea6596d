"""The process that starts ranks: `python -m worker.group.forkserver SOCKET_FD CONFIG`.

It imports once what all ranks need, then forks one child per rank that its starter asks
for, on an inherited socket: frames of JSON, with the rank's descriptors beside them. It
tells which process was started and how each one ended. Children are this process's, so
it alone kills and reaps them: a process id can't be taken for another's.

One thread, and nothing computed before a fork: what a child inherits is whole. When the
starter is gone, all children are killed; when this process dies, the kernel kills them.
"""

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec
import setproctitle

from worker.config import RankConfig
from worker.engine.preload import preload
from worker.group import rank_main
from worker.group.framing import HEADER, frame
from worker.group.launch import LOST, Ended, Kill, Start, Started, decode_order, with_descriptors

logger = logging.getLogger("worker.group.forkserver")  # not __main__

_PR_SET_PDEATHSIG: Final = 1
_MAX_FDS: Final = 250  # the kernel's bound of one message is 253


def main(argv: Sequence[str]) -> int:
    """Serve until the starter is gone; return the exit status."""
    fd, config = argv
    setproctitle.setproctitle("radixmesh-worker forkserver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    starter = socket.socket(fileno=int(fd))
    preload(msgspec.json.decode(config, type=RankConfig))
    # Nothing imported is garbage: let no collector write to pages that ranks share.
    gc.freeze()
    ForkServer(starter, rank_main.run).serve()
    return 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Beyond Linux there is no such request, and a parent may have died before it: the
    end of the sockets is the other half.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ForkServer:
    """Starts, kills and reaps ranks. `run` is what a rank process does; it returns its status."""

    def __init__(self, starter: socket.socket, run: Callable[[RankConfig], int]) -> None:
        self._starter = starter
        self._run = run
        self._pids: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<ForkServer of {len(self._pids)} ranks>"

    def serve(self) -> None:
        """Do what the starter asks until it is gone; then kill all that is left."""
        told, wakes = os.pipe()
        os.set_blocking(told, False)
        os.set_blocking(wakes, False)
        # A handler of Python's own makes the pipe readable at each child's end.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(told, select.POLLIN)
        poller.register(self._starter, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in poller.poll()]
                if told in ready:
                    _drain(told)
                    self._reap()
                if self._starter.fileno() in ready:
                    self._obey()
        except (EOFError, ConnectionError):
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)

    def _obey(self) -> None:
        order, fds = self._receive()
        if isinstance(order, Kill):
            if pid := self._pids.get(order.number):
                os.kill(pid, order.signal)
            return
        try:
            self._start(order, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _start(self, order: Start, fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            logger.exception("no process for a rank")
            self._say(Ended(order.number, LOST))
            return
        if pid == 0:
            self._become(with_descriptors(order.config, fds), parent)
        self._pids[order.number] = pid
        self._say(Started(order.number, pid))

    def _become(self, config: RankConfig, parent: int) -> NoReturn:
        status = 1
        try:
            die_with_parent()
            # A session of its own: a terminal's Ctrl-C reaches the front alone, which drains.
            os.setsid()
            os.close(signal.set_wakeup_fd(-1))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._starter.close()
            if os.getppid() == parent:
                status = self._run(config)
        except BaseException:  # noqa: BLE001 - the end of a process; nobody is left to catch it
            traceback.print_exc()
        finally:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[number]
                self._say(Ended(number, os.waitstatus_to_exitcode(status)))

    def _say(self, answer: Started | Ended) -> None:
        self._starter.sendall(frame(msgspec.json.encode(answer)))

    def _receive(self) -> tuple[Start | Kill, list[int]]:
        # The descriptors come with the header, which is sent by itself.
        header, fds, _, _ = socket.recv_fds(self._starter, HEADER.size, _MAX_FDS)
        try:
            header += self._exactly(HEADER.size - len(header))
            return decode_order(self._exactly(HEADER.unpack(header)[0])), list(fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _exactly(self, size: int) -> bytes:
        body = bytearray()
        while len(body) < size:
            part = self._starter.recv(size - len(body))
            if not part:
                raise EOFError
            body += part
        return bytes(body)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
