"""An interrupt of a service that still imports ends it at once, and without a traceback."""

import signal
import subprocess
import sys

import pytest

from radixmesh.settings import child_environment

SERVICES = ["router", "worker", "tokenizer_svc tokenizer", "tokenizer_svc detokenizer"]


@pytest.mark.parametrize("service", SERVICES)
def test_an_interrupt_of_a_service_that_still_imports_ends_it_quietly(service: str) -> None:
    # It says what it imports, and waits when nobody reads that.
    argv = (sys.executable, "-X", "importtime", "-m", *service.split())
    with subprocess.Popen(
        argv, stderr=subprocess.PIPE, pipesize=4096, text=True, env=child_environment()
    ) as process:
        assert process.stderr is not None
        assert any("pydantic" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGINT
