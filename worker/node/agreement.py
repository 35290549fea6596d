"""What all hosts of a group must have been told alike, and how they are found to differ."""

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from worker.config import RankConfig

# Of one host or one rank only; or agreed upon when the ranks are ready.
_OWN: Final = frozenset(
    (
        *("model_dir", "threads", "device", "dp", "kv_bytes", "log_level", "spin"),
        *("dp_rank", "pp_rank", "tp_rank"),
        *("mailbox_fd", "broadcast_fds", "tensor_fd"),
        *("host", "store_host", "store_port", "store_fd"),
    )
)


def shared_settings(base: RankConfig, nnodes: int) -> dict[str, str]:
    """Return what another host must have been told too, by name.

    Raises:
        OSError: The model's directory can't be read.
    """
    told: dict[str, object] = msgspec.structs.asdict(base)
    told = {name: value for name, value in told.items() if name not in _OWN}
    told["nnodes"] = nnodes
    for name in ("config.json", "tokenizer.json"):
        path = Path(base.model_dir) / name
        told[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"
    return {name: str(value) for name, value in told.items()}


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return what differs, for people; empty when nothing does."""
    pairs = {name: (ours.get(name), theirs.get(name)) for name in sorted(ours | theirs)}
    return ", ".join(
        f"{name} is {one!r} at host 0 and {other!r} here"
        for name, (one, other) in pairs.items()
        if one != other
    )
