"""Faults of the tokenizers library become InternalError. Knows no tokenizer.

A panic in its Rust code is raised as a BaseException, which would take an event
loop down with it; here it fails the one call that met it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from radixmesh.errors import MeshError
from radixmesh.rpc.status import conceal


@contextmanager
def guarded(doing: str) -> Iterator[None]:
    """Log whatever goes wrong inside and raise it as InternalError; typed errors pass.

    Args:
        doing: What is being done, for the log.
    """
    try:
        yield
    except MeshError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise conceal(error, doing) from error
        raise
