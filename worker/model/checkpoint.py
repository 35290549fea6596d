"""Reads parts of weights from the safetensors files of a model directory.

Knows files, names and slices; knows no model. Only what is asked for is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixmesh.errors import InvalidRequest

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
# What quantized weights are stored as means something only with their scales.
_FORMATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


class _Index(msgspec.Struct, frozen=True):
    """Which file each tensor lies in."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank needs of one tensor.

    Attributes:
        names: Under which it may lie in the files; the first that is there counts.
        shape: Of the whole tensor.
        dim: Along which it is cut, or None for all of it.
        span: What is kept of that dimension.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int | None = None
    span: range = range(0)


class Checkpoint:
    """The weights of a directory, in one file or several. Close it, or use it in a `with`.

    Attributes:
        bytes_read: Of all parts so far, as they lie in the files.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files.

        Raises:
            InvalidRequest: They are not there or can't be read.
        """
        self._folder = folder
        self.bytes_read = 0
        self._files: list[Any] = []
        self._file_of: dict[str, Any] = {}
        try:
            self._open(folder)
        except (OSError, msgspec.MsgspecError, SafetensorError) as error:
            self.close()
            raise InvalidRequest(f"--model: cannot load weights of {folder}: {error}") from error

    def __repr__(self) -> str:
        return f"<Checkpoint {self._folder} {len(self._file_of)} tensors>"

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; what was read stays."""
        for file in self._files:
            file.__exit__(None, None, None)
        self._files, self._file_of = [], {}

    def lacking(self, parts: Sequence[Part]) -> list[str]:
        """Return the names of those parts that are not there."""
        return [part.names[0] for part in parts if self.name_of(part) is None]

    def name_of(self, part: Part) -> str | None:
        """Return the name under which a part lies here, if it does."""
        return next((name for name in part.names if name in self._file_of), None)

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        """Read one part and convert it; on the CPU.

        Raises:
            InvalidRequest: It is not there, has another shape, is not in plain floating-point
                numbers, or can't be read.
        """
        name = self.name_of(part)
        if name is None:
            raise InvalidRequest(f"--model: {self._folder} lacks weights: {part.names[0]}")
        try:
            found = self._file_of[name].get_slice(name)
            if tuple(found.get_shape()) != part.shape:
                shapes = f"{tuple(found.get_shape())}, expected {part.shape}"
                raise InvalidRequest(f"--model: {name} in {self._folder} is {shapes}")
            if found.get_dtype() not in _FORMATS:
                kind = f"{found.get_dtype()}; quantized weights are not served"
                raise InvalidRequest(f"--model: {name} in {self._folder} is {kind}")
            tensor: Tensor = found[_index(part)]
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"--model: cannot read {name} of {self._folder}: {error}"
            ) from error
        self.bytes_read += tensor.nbytes
        return tensor.to(dtype)

    def _open(self, folder: Path) -> None:
        if (folder / _SINGLE).is_file():
            file = self._open_file(folder / _SINGLE)
            self._file_of = dict.fromkeys(file.keys(), file)
            return
        names = msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index).weight_map
        files = {name: self._open_file(folder / name) for name in sorted(set(names.values()))}
        self._file_of = {name: files[file] for name, file in names.items()}

    def _open_file(self, path: Path) -> Any:
        file: Any = safe_open(path, framework="pt", device="cpu")
        self._files.append(file.__enter__())
        return file


def _index(part: Part) -> tuple[slice, ...]:
    cut = slice(part.span.start, part.span.stop)
    return tuple(cut if dim == part.dim else slice(None) for dim in range(len(part.shape)))
