"""Puts other weights of the same shapes into a model that computes already.

Two steps, so that all ranks can agree between them: read and check everything, then
copy, which cannot fail. Knows transformers' modules and configs; knows no other rank.
"""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from radixmesh.errors import InvalidRequest
from worker.model.load import LoadedModel, load_whole, read_config
from worker.model.shard import read_parts

# What two configs of the same computation may differ in.
_FREE: Final = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "architectures"}
)


def read_update(model: LoadedModel, folder: Path) -> dict[str, Tensor]:
    """Return what this rank's parameters are to become, by name, in the model's dtype.

    Raises:
        InvalidRequest: The directory cannot be read, or holds another model; the message
            names what differs.
    """
    _check_config(model.config, read_config(folder).get_text_config(decoder=True), folder)
    if model.shard is not None:
        tensors, _ = read_parts(folder, model.parts, model.dtype)
    else:
        other = load_whole(folder, model.attention, model.dtype)
        tensors = dict(other.named_parameters(remove_duplicate=False))
    _check_fit(dict(model.module.named_parameters(remove_duplicate=False)), tensors, folder)
    return tensors


def apply_update(model: LoadedModel, tensors: dict[str, Tensor]) -> None:
    """Copy what `read_update` returned into the model."""
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.copy_(tensors[name])


def _check_config(ours: Any, theirs: Any, folder: Path) -> None:
    mine, others = ours.to_dict(), theirs.to_dict()
    for name in sorted(mine.keys() | others.keys()):
        if name not in _FREE and mine.get(name) != others.get(name):
            raise InvalidRequest(
                f"{folder} is another model: {name} is {others.get(name)}, here {mine.get(name)}"
            )


def _check_fit(ours: dict[str, Any], theirs: dict[str, Tensor], folder: Path) -> None:
    if ours.keys() != theirs.keys():
        raise InvalidRequest(f"{folder} lacks {min(ours.keys() ^ theirs.keys())}")
    first: dict[int, str] = {}
    for name, parameter in ours.items():
        if parameter.shape != theirs[name].shape:
            shapes = f"{tuple(theirs[name].shape)}, expected {tuple(parameter.shape)}"
            raise InvalidRequest(f"{name} in {folder} is {shapes}")
        # Two names of one parameter (a tied head) cannot become different.
        twin = first.setdefault(id(parameter), name)
        if theirs[twin] is not theirs[name] and not torch.equal(theirs[twin], theirs[name]):
            raise InvalidRequest(f"{name} and {twin} are one here, and differ in {folder}")
