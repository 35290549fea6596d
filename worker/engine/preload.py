"""Imports what an engine needs, before its ranks are forked. Computes nothing, starts no thread.

Modules that are not installed are left out: the rank that needs one says so itself.
"""

import importlib
import json
from pathlib import Path

from radixmesh.settings import stay_offline
from worker.config import RankConfig

_TORCH = ("worker.engine.torch_engine", "transformers.models.auto.modeling_auto")
_GLOO = ("worker.parallel.world",)


def preload(config: RankConfig) -> None:
    """Import what ranks with such a configuration need: engine, architecture, gloo."""
    names: list[str] = []
    if config.engine == "fake":
        names.append("worker.engine.fake")
    elif config.engine == "torch":
        stay_offline()
        names += [*_TORCH, *_architecture(Path(config.model_dir))]
    if config.carrier == "gloo":
        names += _GLOO
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            return


def _architecture(model_dir: Path) -> list[str]:
    try:
        kind = json.loads((model_dir / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(kind, str) or not kind.isidentifier():
        return []
    return [f"transformers.models.{kind}.modeling_{kind}"]
