"""What an engine is told, by keyword -> the settings of a worker group. Starts nothing."""

import os
from typing import Any

from pydantic import ValidationError

from radixmesh.errors import InvalidRequest
from worker.settings import WorkerSettings

# Of the service alone: a library listens nowhere.
_SERVICE_ONLY = ("host", "port", "metrics_port", "drain_grace_s")


def make_settings(model: str | os.PathLike[str], **fields: Any) -> WorkerSettings:
    """Return settings; those that are not given are as the environment says, as in a service.

    Raises:
        InvalidRequest: A field is unknown, out of range or of no use here; it names the field.
    """
    for name in _SERVICE_ONLY:
        if name in fields:
            raise InvalidRequest(f"{name}: an engine has no such setting", field=name)
    # A script's own output should not drown in what its ranks say.
    fields.setdefault("log_level", "warning")
    try:
        return WorkerSettings(model=os.fspath(model), **fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{name}: {message}" if name else message, field=name) from error
