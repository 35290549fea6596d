"""`radixmesh-convert`: makes a Hugging Face directory of a GGUF file, once.

Knows files and transformers' GGUF reader. A directory is whole or absent: it is
written beside its place under a lock and renamed. It never asks a hub.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from radixmesh import models
from radixmesh.errors import InvalidRequest, MeshError
from radixmesh.settings import stay_offline

PROG = "radixmesh-convert"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the model directory for a name or path, converting a GGUF file first.

    Returns:
        The exit status: 0, or 1 with a message on stderr.
    """
    description = (main.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=PROG, description=description)
    parser.add_argument("model", help="a Hugging Face directory, a .gguf file, or 'smollm2'")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="have it here too; default: in the cache only"
    )
    given = parser.parse_args(argv)
    try:
        folder = convert(given.model)
        if given.output is not None:
            folder = place(folder, given.output)
    except OSError as error:
        _say(str(error))
        return 1
    except MeshError as error:
        _say(error.message)
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def convert(model: str) -> Path:
    """Return the model directory of a name or path; a GGUF file is converted unless it was.

    Raises:
        InvalidRequest: There is no such model, or its GGUF cannot be read.
    """
    gguf = None if models.is_model_dir(Path(model)) else models.find_gguf(model)
    if gguf is None:
        return models.resolve(model)
    folder = models.converted_dir(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if not models.is_model_dir(folder):
            _convert_into(gguf, folder)
    return folder


def place(folder: Path, output: Path) -> Path:
    """Make a model directory at `output` too, of hard links where that can be, else of copies.

    Raises:
        InvalidRequest: Something else is there.
        OSError: It cannot be written.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with _locked(output.with_name(f".{output.name}.lock")):
        if _holds_the_same(folder, output):
            return output
        if output.exists() and not models.is_model_dir(output) and any(output.iterdir()):
            raise InvalidRequest(f"--output: {output} holds something that is no model")
        partial = output.with_name(f".{output.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for file in _files(folder):
            _link_or_copy(file.resolve(), partial / file.name)
        shutil.rmtree(output, ignore_errors=True)
        partial.rename(output)
    return output


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _holds_the_same(folder: Path, output: Path) -> bool:
    def seen(place: Path) -> list[tuple[str, int, int]]:
        stats = [(file.name, file.stat()) for file in _files(place)]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    return output.is_dir() and seen(output) == seen(folder)


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(file, target)


def _locked(path: Path) -> AbstractContextManager[object]:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another conversion of the same file")
        return lock.acquire()


def _convert_into(gguf: Path, folder: Path) -> None:
    # Only the holder of the lock uses this name, so what lies there is of a killed run.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _say(f"converting {gguf.name}; this happens once and takes about half a minute")
    began = time.monotonic()
    try:
        write_model(gguf, partial)
        if not models.is_model_dir(partial):
            raise InvalidRequest(f"{gguf} holds no tokenizer that transformers can convert")
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors makes its file readable by the owner alone
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _say(f"converted in {time.monotonic() - began:.0f} s: {folder}")


def write_model(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), tokenizer, chat template and configs of a GGUF file.

    Raises:
        InvalidRequest: transformers cannot read the file, or is not installed.
    """
    stay_offline()
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise InvalidRequest(
            f"converting a GGUF needs {error.name}; run: pip install 'radixmesh[worker]'"
        ) from error
    logging.set_verbosity_error()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model, info = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, output_loading_info=True, **source
        )
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise InvalidRequest(f"transformers cannot read {gguf}: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    if info["missing_keys"]:
        raise InvalidRequest(f"{gguf} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
    # The weights are plain from here on; save_pretrained refuses while these say otherwise.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(message: str) -> None:
    sys.stderr.write(f"{PROG}: {message}\n")


if __name__ == "__main__":
    raise SystemExit(main())
