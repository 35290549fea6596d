"""An installation that lacks an extra: every service says which, and ends."""

import subprocess
import sys
from pathlib import Path

import pytest

ROUTER = "from router.__main__ import main; sys.exit(main(['--port=0', '--http-port=0']))"
TEXT = "from tokenizer_svc.__main__ import main; sys.exit(main([{role!r}, '--model={model}']))"
RANK = (
    "from worker.engine.build import RankConfig, build_engine; "
    "build_engine(RankConfig(model_dir={model!r}, engine='torch'))"
)


def without(module: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python where a module is not installed."""
    blocked = f"import sys; sys.modules[{module!r}] = None; {code}"
    return subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, check=False, timeout=60
    )


def test_a_router_without_fastapi_names_its_extra() -> None:
    ended = without("fastapi", ROUTER)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "radixmesh-router: needs fastapi; run: pip install 'radixmesh[http]'"
    )


def test_a_router_that_is_to_ask_kubernetes_names_the_extra_for_it() -> None:
    asking = ROUTER.replace("'--port=0'", "'--groups-service=workers', '--port=0'")
    ended = without("kubernetes_asyncio", asking)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "radixmesh-router: needs kubernetes_asyncio; run: pip install 'radixmesh[kubernetes]'"
    )


@pytest.mark.parametrize("role", ["tokenizer", "detokenizer"])
def test_a_text_service_without_tokenizers_names_its_extra(model_dir: Path, role: str) -> None:
    ended = without("tokenizers", TEXT.format(role=role, model=model_dir))
    assert ended.returncode == 2
    assert ended.stderr == (
        f"radixmesh-{role}: needs tokenizers; run: pip install 'radixmesh[tokenizer]'\n"
    )


def test_a_rank_without_torch_names_its_extra(model_dir: Path) -> None:
    ended = without("torch", RANK.format(model=str(model_dir)))
    assert "--engine torch needs torch; run: pip install 'radixmesh[worker]'" in ended.stderr
