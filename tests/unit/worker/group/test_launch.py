"""A rank's configuration survives its command line."""

import msgspec
import pytest

from worker.group.launch import FakeConfig, RankConfig, parse_config, rank_command


def test_the_command_line_carries_the_whole_configuration() -> None:
    config = RankConfig(
        model_dir="/models/a b'\"\n",
        engine="fake",
        tp=2,
        tp_rank=1,
        incarnation=2**63,
        fake=FakeConfig(eos_after=3, faults=("exit@step=20", "hang@step=1:tp=1")),
        broadcast_fds=(7,),
    )
    command = rank_command(config)
    assert command[1:3] == ["-m", "worker.group.rank_main"]
    assert parse_config(command[3]) == config


def test_nonsense_is_no_configuration() -> None:
    with pytest.raises(msgspec.ValidationError):
        parse_config("{}")
