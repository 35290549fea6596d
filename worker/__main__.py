"""`python -m worker`, `radixmesh-worker`: read the settings, run a worker group's front."""

import sys
from functools import partial

from radixmesh.errors import InvalidRequest
from radixmesh.rpc.lifecycle import start
from radixmesh.settings import load
from worker.app import serve
from worker.front.supervisor import GroupEnded
from worker.settings import WorkerSettings

PROG = "radixmesh-worker"


def main() -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    settings = load(WorkerSettings, sys.argv[1:], prog=PROG)
    title = f"front {settings.served_name} dp={settings.dp} pp={settings.pp} tp={settings.tp}"
    try:
        return start(PROG, partial(serve, settings), title=title, log_level=settings.log_level)
    except InvalidRequest as error:
        sys.stderr.write(f"{PROG}: --model: {error.message}\n")
        return 2
    except GroupEnded as end:
        sys.stderr.write(f"{PROG}: {end}\n")
        return end.exit_status


if __name__ == "__main__":
    sys.exit(main())
