"""How a rank process is started: its configuration and its command line.

The starter makes the sockets, passes the descriptors that the configuration
names (`pass_fds`) and watches the process; see `front/supervisor.py`. Ranks die
with their parent: by PR_SET_PDEATHSIG and by the end of their sockets.
"""

import sys
from typing import Final

import msgspec

from radixmesh.errors import InvalidRequest, NotSupported
from worker.config import FakeConfig, RankConfig

__all__ = ["REFUSALS", "FakeConfig", "RankConfig", "parse_config", "rank_command"]

# A rank that says one of these at its start would say so again, however often it is started.
REFUSALS: Final = (InvalidRequest, NotSupported)


def rank_command(config: RankConfig) -> list[str]:
    """Return the command line that runs this rank."""
    argument = msgspec.json.encode(config).decode()
    return [sys.executable, "-m", "worker.group.rank_main", argument]


def parse_config(argument: str) -> RankConfig:
    """Read the configuration back.

    Raises:
        msgspec.ValidationError: It is not one.
    """
    return msgspec.json.decode(argument, type=RankConfig)
