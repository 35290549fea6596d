"""What a rank process does, from its start to its end; `forkserver.py` makes the process.

Builds the engine and what stands on it, says that it is ready, and turns until the
front is gone. Whatever breaks it is told to the front as `Broken` and ends the
process: with status 0 where it was another rank, else with another one; nothing is
mended here, the front starts anew.
"""

import logging
import socket
import time
from contextlib import suppress
from typing import Final

import msgspec
import setproctitle

from radixmesh.errors import BY_REASON, InternalError, MeshError, RankDesync
from radixmesh.telemetry.logs import setup_logging
from worker.config import RankConfig
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.group.carrier import Leaf, PeerLost, Root
from worker.group.launch import REFUSALS
from worker.group.local import LocalLeaf, LocalRoot
from worker.group.mailbox import FrontGone, Mailbox
from worker.group.rank import Follower, Leader
from worker.group.tamper import make_tamper
from worker.group.topology import Place, Topology
from worker.group.turn import Turns, make_turns
from worker.group.watchdog import Watchdog, dump_on_signal
from worker.peers import PeerGone
from worker.request import Broken, Ready

logger = logging.getLogger(__name__)

_HELLO: Final = msgspec.msgpack.Decoder(Ready | Broken)


def run(config: RankConfig) -> int:
    """Be this rank until the front is gone; return the exit status."""
    began = time.perf_counter()
    place = Place(config.dp_rank, config.pp_rank, config.tp_rank)
    setproctitle.setproctitle(f"radixmesh-worker rank {place}")
    setup_logging("worker", config.log_level)
    dump_on_signal("starting")
    if config.mailbox_fd < 0:
        return _follow(config, place, began)
    return _lead(config, place, began)


def _lead(config: RankConfig, place: Place, began: float) -> int:
    mailbox = Mailbox(socket.socket(fileno=config.mailbox_fd))
    try:
        root = _root(config)
        engine = build_engine(config)
        kv_blocks = _agree(root, _ready(config, engine, began))
        root.broadcast(msgspec.msgpack.encode(kv_blocks))
        engine.reserve(kv_blocks)
        _agree(root, _ready(config, engine, began))
        ready = _ready(config, engine, began)
        mailbox.send(ready)
        _log_ready(place, ready)
        turns = _turns(config, engine)
        watchdog = Watchdog(config.step_timeout_s, state=turns)
        watchdog.start()
        shape = Topology(pp=config.pp, tp=config.tp)
        Leader(turns, root, mailbox, watchdog, shape=shape).run()
    except FrontGone:
        # By the front, which lives on as a rule: it starts the replica anew.
        logger.info("mailbox closed", extra={"place": place})
        return 0
    except PeerLost as error:
        logger.info("rank ends", extra={"place": place, "reason": error.message})
        ended = isinstance(error, PeerGone)
        _report(mailbox, Broken(error.reason, error.message, ended=ended))
        return 0  # as every rank that leaves because of another one
    except REFUSALS as error:
        return _report(mailbox, Broken(error.reason, error.message))
    except MeshError as error:
        logger.exception("rank broken", extra={"place": place})
        return _report(mailbox, Broken(error.reason, error.message))
    except Exception as error:
        logger.exception("rank broken", extra={"place": place})
        return _report(
            mailbox, Broken("INTERNAL", f"rank {place}: {type(error).__name__}", ended=True)
        )


def _follow(config: RankConfig, place: Place, began: float) -> int:
    leaf: Leaf | None = None
    try:
        leaf = _leaf(config)
        engine = build_engine(config)
        leaf.hello(msgspec.msgpack.encode(_ready(config, engine, began)))
        engine.reserve(msgspec.msgpack.decode(leaf.receive(), type=int))
        ready = _ready(config, engine, began)
        leaf.hello(msgspec.msgpack.encode(ready))
        _log_ready(place, ready)
        turns = _turns(config, engine)
        watchdog = Watchdog(config.step_timeout_s, state=turns)
        watchdog.start()
        Follower(turns, leaf, watchdog, tamper=make_tamper(config)).run()
    except PeerLost as error:
        logger.info("rank ends", extra={"place": place, "reason": error.message})
        return 0
    except REFUSALS as error:
        return _refuse(leaf, Broken(error.reason, error.message)) if leaf else 1
    except Exception:
        # The end of this process is what rank (0, 0) and the front notice.
        logger.exception("rank broken", extra={"place": place})
        return 1


def _log_ready(place: Place, ready: Ready) -> None:
    fields = {"startup_s": round(ready.startup_s, 3), "kv_blocks": ready.kv_blocks}
    logger.info("rank ready", extra={"place": place, **fields})


def _root(config: RankConfig) -> Root:
    if config.carrier == "local":
        sockets = [socket.socket(fileno=fd) for fd in config.broadcast_fds]
        return LocalRoot(
            sockets,
            stage_size=config.tp,
            deadline_s=config.peer_timeout_s,
            step_deadline_s=config.step_timeout_s,
        )
    from worker.group.gloo import GlooRoot  # needs torch

    return GlooRoot(config)


def _leaf(config: RankConfig) -> Leaf:
    if config.carrier == "local":
        return LocalLeaf(socket.socket(fileno=config.broadcast_fds[0]))
    from worker.group.gloo import GlooLeaf  # needs torch

    return GlooLeaf(config)


def _turns(config: RankConfig, engine: Engine) -> Turns:
    turns = make_turns(config, engine)
    dump_on_signal(turns)
    return turns


def _ready(config: RankConfig, engine: Engine, began: float) -> Ready:
    info = engine.info
    return Ready(
        block_tokens=info.block_tokens,
        kv_blocks=info.kv_blocks,
        max_model_len=min(config.max_model_len or info.max_model_len, info.max_model_len),
        vocab_size=info.vocab_size,
        eos_ids=info.eos_ids,
        startup_s=time.perf_counter() - began,
    )


def _agree(root: Root, own: Ready) -> int:
    """Hear every rank; return how many blocks all of them can hold."""
    blocks = own.kv_blocks
    for number, word in enumerate(root.hellos(), 1):
        other = _HELLO.decode(word)
        if isinstance(other, Broken):
            raise BY_REASON.get(other.reason, InternalError)(other.message)
        same = msgspec.structs.replace(other, startup_s=own.startup_s, kv_blocks=own.kv_blocks)
        if same != own:
            raise RankDesync(f"rank {number} can take {other}, rank 0 {own}")
        blocks = min(blocks, other.kv_blocks)
    return blocks


def _refuse(leaf: Leaf, broken: Broken) -> int:
    # Rank (0, 0) passes it on. It must not be forestalled by the end of this process.
    with suppress(PeerLost):
        leaf.hello(msgspec.msgpack.encode(broken))
        leaf.receive()
    return 1


def _report(mailbox: Mailbox, broken: Broken) -> int:
    try:
        mailbox.send(broken)
    except FrontGone:
        logger.info("mailbox closed")
    return 1
