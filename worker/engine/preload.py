"""Imports what an engine needs, before its ranks are forked. Computes nothing, starts no thread.

Modules that are not installed are left out: the rank that needs one says so itself.
"""

import importlib
import json
from pathlib import Path

from radixmesh.settings import stay_offline

_TORCH = ("worker.engine.torch_engine", "transformers.models.auto.modeling_auto")


def preload(engine: str, model_dir: Path) -> None:
    """Import the modules of `engine`, and those of the architecture that `model_dir` names."""
    if engine == "fake":
        importlib.import_module("worker.engine.fake")
    if engine != "torch":
        return
    stay_offline()
    for name in (*_TORCH, *_architecture(model_dir)):
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
