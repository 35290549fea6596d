"""`python -m worker`, `radixmesh-worker`: run a worker group's front, or a further host's ranks."""

import signal
import sys
from functools import partial

PROG = "radixmesh-worker"


def main() -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    # Until the service takes it, an interrupt ends this at once, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only then: these take the better part of a second.
    from radixmesh.errors import InvalidRequest
    from radixmesh.rpc.lifecycle import start
    from radixmesh.settings import load
    from worker.app import serve, serve_node
    from worker.front.supervisor import GroupEnded
    from worker.settings import WorkerSettings

    settings = load(WorkerSettings, sys.argv[1:], prog=PROG)
    front = settings.node_rank == 0
    part = "front" if front else f"node {settings.node_rank}"
    title = f"{part} {settings.served_name} dp={settings.dp} pp={settings.pp} tp={settings.tp}"
    main = partial(serve if front else serve_node, settings)
    try:
        return start(PROG, main, title=title, log_level=settings.log_level)
    except InvalidRequest as error:
        flag = "" if error.field else "--model: "
        sys.stderr.write(f"{PROG}: {flag}{error.message}\n")
        return 2
    except GroupEnded as end:
        sys.stderr.write(f"{PROG}: {end}\n")
        return end.exit_status


if __name__ == "__main__":
    sys.exit(main())
