"""Compiles a C++ file of this package when it is first needed, and keeps what came out.

The result lies in the cache folder under a name that stands for everything it depends
on: the source, the compiler, the flags and the CPU. Processes that want it at the
same time wait for the one that compiles.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from radixmesh.settings import cache_dir
from worker.parallel.segment import Unavailable

__all__ = ["library"]

logger = logging.getLogger(__name__)

_FLAGS: Final = ("-std=c++17", "-O3", "-shared", "-fPIC")
_NATIVE: Final = "-march=native"
_COMPILE_S: Final = 120.0
_CPU_WORDS: Final = ("model name", "flags", "Features", "CPU part")


def library(source: Path) -> ctypes.CDLL:
    """Return the library that the source makes. Its functions are called without the GIL.

    Raises:
        Unavailable: There is no g++, it fails, or the cache folder cannot be used.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("there is no g++")
    try:
        target = _target(source, compiler)
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=_COMPILE_S):
            if not target.exists():
                _compile(compiler, source, target)
        return ctypes.CDLL(str(target))
    except (OSError, Timeout, subprocess.SubprocessError) as error:
        raise Unavailable(f"{source.name} could not be compiled: {error}") from error


def _target(source: Path, compiler: str) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_S
    ).stdout
    key = hashlib.sha256()
    for part in (source.read_bytes(), version, " ".join(_FLAGS).encode(), _cpu().encode()):
        key.update(len(part).to_bytes(8, "little") + part)
    return cache_dir() / "native" / f"{source.stem}-{key.hexdigest()[:24]}.so"


def _cpu() -> str:
    """Return what `-march=native` follows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.startswith(_CPU_WORDS)})])


def _compile(compiler: str, source: Path, target: Path) -> None:
    began = time.perf_counter()
    # Who wrote these was killed: whoever compiles has the lock.
    for left in target.parent.glob(f"{target.stem}*.part"):
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".part")
    os.close(handle)
    made = Path(name)
    try:
        command = [compiler, *_FLAGS, "-o", name, str(source)]
        if subprocess.run([*command, _NATIVE], capture_output=True, timeout=_COMPILE_S).returncode:
            subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_S)
        made.chmod(0o755)
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    took_s = round(time.perf_counter() - began, 2)
    logger.info("compiled", extra={"source": source.name, "took_s": took_s})
