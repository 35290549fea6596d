"""A replica of several ranks in threads of this process, over real sockets, with a front's end.

The same loops, carrier and mailbox as in rank processes; only the processes are
missing. A rank's end, whatever it is, is kept in `ends`.
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

import msgspec

from tests.fakes.plans import reserved
from tests.fakes.replica import EOS_ID, ORDINARY
from worker.config import FakeConfig, RankConfig
from worker.engine.engine import Engine, EngineInfo, StepPlan, StepResult
from worker.engine.fake import FakeEngine
from worker.engine.faults import parse_faults
from worker.engine.overlapped import Overlapped
from worker.engine.vocabulary import Vocabulary
from worker.group.framing import FrameSplitter, frame
from worker.group.local import LocalLeaf, LocalRoot
from worker.group.mailbox import Mailbox
from worker.group.rank import Follower, Leader, Tamper
from worker.group.tamper import make_tamper
from worker.group.topology import Topology
from worker.group.turn import Turns, make_turns
from worker.group.watchdog import Watchdog
from worker.peers import PeerLost
from worker.request import Broken, Inbound, Outbound, StepOutput

_OUTBOUND: Final = msgspec.msgpack.Decoder(Outbound)


class FrontEnd:
    """The front's end of a mailbox, blocking, for tests."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(10)
        self._sock = sock
        self._splitter = FrameSplitter()
        self._ready: list[bytes] = []

    def send(self, *messages: Inbound) -> None:
        # A rank that has ended meanwhile is seen by who reads next.
        with suppress(BrokenPipeError):
            self._sock.sendall(b"".join(frame(msgspec.msgpack.encode(one)) for one in messages))

    def receive(self) -> Outbound | None:
        """The next message; None when the rank is gone."""
        while not self._ready:
            try:
                data = self._sock.recv(1 << 16)
            except ConnectionResetError:  # it ended with input that it had not read
                data = b""
            if not data:
                return None
            self._ready = self._splitter.feed(data)
        return _OUTBOUND.decode(self._ready.pop(0))

    def last_word(self) -> Broken:
        """What the replica broke of, after all that it had still to say."""
        message = self.receive()
        while isinstance(message, StepOutput):
            message = self.receive()
        assert isinstance(message, Broken), message
        return message

    def outputs(self) -> Iterator[StepOutput]:
        """Step outputs until the rank is gone or says something else."""
        while isinstance(message := self.receive(), StepOutput):
            yield message

    def close(self) -> None:
        self._sock.close()


class RankThreads:
    """pp x tp ranks, running. `close` ends them as the end of a front does.

    With `staged` a stage learns what a step drew from the last stage, and waits for that.
    """

    def __init__(
        self,
        *,
        pp: int = 1,
        tp: int = 1,
        faults: Sequence[str] = (),
        kv_blocks: int = 64,
        overlap: bool = False,
        deadline_s: float = 5.0,
        prefill_tokens_per_s: float = 0.0,
        decode_ms: float = 0.0,
        staged: bool = False,
    ) -> None:
        front, mailbox = socket.socketpair()
        self.front = FrontEnd(front)
        self.turns: list[Turns] = []
        self.ends: dict[int, BaseException] = {}
        pairs = [socket.socketpair() for _ in range(pp * tp - 1)]
        tampers: list[Tamper] = []
        self._drawn: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(pp)]
        for place in Topology(pp=pp, tp=tp).replica(0):
            config = RankConfig(
                model_dir="",
                engine="fake",
                pp=pp,
                tp=tp,
                pp_rank=place.pp_rank,
                tp_rank=place.tp_rank,
                max_batched_tokens=32,
                max_running=4,
                overlap=overlap,
                fake=FakeConfig(
                    faults=tuple(faults),
                    kv_blocks=kv_blocks,
                    prefill_tokens_per_s=prefill_tokens_per_s,
                    decode_ms=decode_ms,
                ),
            )
            self.turns.append(_turns(config, self._drawn if staged else ()))
            tampers.append(make_tamper(config))
        watchdog = Watchdog(60)
        self._mailbox = Mailbox(mailbox)
        ours = [one for one, _ in pairs]
        self._root = LocalRoot(ours, stage_size=tp, deadline_s=deadline_s)
        self._leaves = [LocalLeaf(other) for _, other in pairs]
        shape = Topology(pp=pp, tp=tp)
        loops = [Leader(self.turns[0], self._root, self._mailbox, watchdog, shape=shape)]
        followers = [
            Follower(turns, leaf, watchdog, tamper=tamper)
            for turns, leaf, tamper in zip(self.turns[1:], self._leaves, tampers[1:], strict=True)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(number, loop), daemon=True)
            for number, loop in enumerate([*loops, *followers])
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all ranks have ended."""
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def close(self) -> None:
        """Let the front go and wait until all ranks have ended."""
        self.front.close()
        self.join()

    def _run(self, number: int, loop: Leader | Follower) -> None:
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001 - a rank's end is what tests look at
            self.ends[number] = error
        finally:
            # What the end of a process does.
            for stage in self._drawn:
                stage.put(False)
            if number == 0:
                self._mailbox.close()
                self._root.close()
            else:
                self._leaves[number - 1].close()


class Staged:
    """An engine of one stage: only the last one draws, and the others wait to be told."""

    def __init__(self, engine: Engine, stage: int, drawn: Sequence["SimpleQueue[bool]"]) -> None:
        self._engine = engine
        self._mine = drawn[stage]
        self._last = stage == len(drawn) - 1
        self._earlier = drawn[:-1]
        self.info = engine.info
        self.reserve = engine.reserve
        self.read_weights = engine.read_weights
        self.use_weights = engine.use_weights
        self.drop_weights = engine.drop_weights
        self.close = engine.close

    def launch(self, plan: StepPlan) -> None:
        self._engine.launch(plan)
        if self._last:
            for stage in self._earlier:
                stage.put(True)

    def collect(self) -> StepResult:
        # As long as a step may take, by default 60 s.
        if not self._last and not self._mine.get(timeout=30):
            raise PeerLost("another stage is gone")
        return self._engine.collect()


def _turns(config: RankConfig, drawn: Sequence["SimpleQueue[bool]"]) -> Turns:
    info = EngineInfo(
        block_tokens=4,
        kv_blocks=config.fake.kv_blocks,
        max_model_len=128,
        vocab_size=40,
        eos_ids=(EOS_ID,),
    )
    vocabulary = Vocabulary(ordinary=ORDINARY, size=40, eos_ids=(EOS_ID,), max_model_len=128)
    faults = parse_faults(config.fake.faults, config)
    engine = reserved(FakeEngine(vocabulary, info, config.fake, faults))
    if config.overlap and config.pp == 1:
        return make_turns(config, Overlapped(engine))
    if drawn:
        return make_turns(config, Staged(engine, config.pp_rank, drawn))
    return make_turns(config, engine)
