"""Where the ranks of one replica meet, and the torch process groups that they form there.

The meeting place is a TCPStore in rank (0, 0), on the socket that it inherited, so no
port is guessed. Gloo binds to the address that the configuration names, not to what
the host's name resolves to: replicas may span hosts with many addresses. Nothing
here runs while nobody computes: an idle replica is as alive after an hour as at first.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist

from radixmesh.errors import NotSupported
from worker.config import RankConfig
from worker.peers import PeerLost

__all__ = ["World", "leave", "world"]

logger = logging.getLogger(__name__)

# Ranks import and compile for a while before they come; the front's own deadline is shorter.
JOIN_TIMEOUT: Final = timedelta(minutes=10)
# Of groups in which a rank waits for work: it is the peer's end that ends such a wait.
NO_TIMEOUT: Final = timedelta(days=3650)
_BACKEND: Final = "gloo_bound"


class World:
    """The process groups of this rank.

    A rank is known by its number in the replica, `pp_rank * tp + tp_rank`; that is its
    rank in `control`. Other groups are formed when all their members ask, in the order
    tp, line, and belong to who asked: what is closed must have no other holder.
    """

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self.size = config.pp * config.tp
        self.rank = config.pp_rank * config.tp + config.tp_rank

    def __repr__(self) -> str:
        return f"<World {self.rank} of {self.size}>"

    @property
    def control(self) -> Any:
        """All ranks of the replica, on the CPU. Its calls wait for ever, unless told otherwise.

        `work.wait(timeout)` on what an asynchronous call returned is how to bound one.
        """
        return dist.group.WORLD

    def form_tp(self) -> Any:
        """Meet the ranks of this stage in a new group, numbered by tp_rank.

        Its calls fail after `peer_timeout_s`.
        """
        first = self._config.pp_rank * self._config.tp
        return self._group(range(first, first + self._config.tp), self._config.peer_timeout_s)

    def form_line(self) -> Any:
        """Meet this tp rank of all stages in a new group, numbered by pp_rank.

        Its calls fail after `step_timeout_s`.
        """
        ranks = range(self._config.tp_rank, self.size, self._config.tp)
        return self._group(ranks, self._config.step_timeout_s)

    def _group(self, ranks: Sequence[int], timeout_s: float) -> Any:
        # Only members take part, so that a stage may form one while another has none.
        try:
            return dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=_backend(self._config),
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            raise PeerLost("another rank did not come to form a group") from error


@cache
def world(config: RankConfig) -> World:
    """Return this process's world; the first call waits for all ranks of the replica.

    Raises:
        NotSupported: The ranks were given no place to meet.
        PeerLost: Not all of them came.
    """
    found = World(config)
    if not config.store_port:
        raise NotSupported("the ranks of this replica were given no place to meet")
    _register(config.host)
    try:
        dist.init_process_group(
            _backend(config),
            store=_store(config, found),
            rank=found.rank,
            world_size=found.size,
            timeout=NO_TIMEOUT,
        )
    except RuntimeError as error:
        raise PeerLost("not all ranks of the replica came to its meeting place") from error
    logger.debug("met", extra={"rank": found.rank, "size": found.size})
    return found


def leave() -> None:
    """Let go of all groups; other ranks' calls in them fail. Harmless when there are none."""
    world.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(config: RankConfig, found: World) -> Any:
    serves = {"is_master": True, "master_listen_fd": config.store_fd} if found.rank == 0 else {}
    return dist.TCPStore(
        config.store_host,
        config.store_port,
        found.size,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        **serves,
    )


def _backend(config: RankConfig) -> str:
    if config.engine == "torch" and torch.cuda.is_available():
        return f"cpu:{_BACKEND},cuda:nccl"
    return _BACKEND


def _register(host: str) -> None:
    if hasattr(dist.Backend, _BACKEND.upper()):
        return
    device: list[Any] = []  # one, with its one thread, for all groups

    def bound(common: Any, _: object) -> Any:
        if not device:
            device.append(dist.ProcessGroupGloo.create_device(hostname=host))
        # torch has no public name for what its own gloo groups are made with.
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001
        options._devices = device  # noqa: SLF001
        options._timeout = common.timeout  # noqa: SLF001
        return dist.ProcessGroupGloo(common.store, common.group_rank, common.group_size, options)

    dist.Backend.register_backend(_BACKEND, bound, extended_api=True, devices=["cpu"])
