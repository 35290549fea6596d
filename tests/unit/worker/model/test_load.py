"""What the CPU can do decides the dtype; a config decides the limits.

Run: pytest tests/unit/worker/model/test_load.py
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from radixmesh.errors import InvalidRequest
from worker.model.load import choose_dtype, cpu_flags
from worker.model.support import choose_max_model_len

CPU = torch.device("cpu")


def test_flags_of_the_first_cpu_are_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu amx_bf16 sse2\n\nprocessor\t: 1\nflags\t: x\n"
    )
    assert cpu_flags(cpuinfo) == {"fpu", "amx_bf16", "sse2"}


def test_arm_calls_them_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("Features\t: fp asimd bf16\n")
    assert "bf16" in cpu_flags(cpuinfo)


def test_a_machine_without_cpuinfo_has_no_known_flags(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_a_named_dtype_is_taken() -> None:
    assert choose_dtype("float32", CPU) is torch.float32
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16


def test_auto_is_bfloat16_exactly_where_the_cpu_has_it() -> None:
    flags = cpu_flags(Path("/proc/cpuinfo"))
    has = bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    assert choose_dtype("auto", CPU) is (torch.bfloat16 if has else torch.float32)


@pytest.mark.parametrize(("wanted", "given"), [(0, 100), (50, 50), (100, 100)])
def test_the_longest_sequence_is_the_models_or_a_shorter_one(wanted: int, given: int) -> None:
    assert choose_max_model_len(SimpleNamespace(max_position_embeddings=100), wanted) == given


def test_a_config_without_a_limit_needs_one_given() -> None:
    assert choose_max_model_len(SimpleNamespace(), 70) == 70
    with pytest.raises(InvalidRequest, match="--max-model-len"):
        choose_max_model_len(SimpleNamespace(), 0)
