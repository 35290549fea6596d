"""Loads a model directory as transformers' module, on the device and in the dtype to use.

Knows transformers, safetensors and what the CPU can do; knows no KV cache and no
batch. It never asks a hub.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixmesh.errors import InvalidRequest
from radixmesh.settings import stay_offline
from worker.model.support import check_config, choose_max_model_len

_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute.

    Attributes:
        module: transformers' causal language model, in eval mode.
        layers: How many layers attend.
        eos_ids: Ids that end an output.
        vocab_size: Width of the logits.
    """

    module: Any
    layers: int
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def load_model(
    folder: Path, *, attention: str, dtype: str = "auto", max_model_len: int = 0, device_index: int
) -> LoadedModel:
    """Load a Hugging Face directory.

    Args:
        folder: Where config.json and the safetensors lie.
        attention: Name of a registered attention function.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        max_model_len: Longest sequence; 0 means the model's limit.
        device_index: Which of this process's CUDA devices, modulo their number; unused
            on the CPU.

    Raises:
        InvalidRequest: The directory cannot be loaded, or a setting does not fit it.
        NotSupported: The model needs what this engine does not do.
    """
    stay_offline()
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = choose_device(device_index)
    chosen = choose_dtype(dtype, device)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"--model: cannot read the config of {folder}: {error}") from error
    text = config.get_text_config(decoder=True)
    length = choose_max_model_len(text, max_model_len)
    check_config(text, length)
    module = _load_weights(folder, attention, chosen).to(device).eval()
    return LoadedModel(
        module=module,
        layers=text.num_hidden_layers,
        dtype=chosen,
        device=device,
        max_model_len=length,
        vocab_size=text.vocab_size,
        eos_ids=_eos_ids(module.generation_config, text),
    )


def _load_weights(folder: Path, attention: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"--model: cannot load {folder}: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    lacking = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lacking:
        raise InvalidRequest(f"--model: {folder} lacks weights: {', '.join(lacking[:3])}, ...")
    return module


def _eos_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    found = getattr(generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def choose_device(index: int) -> torch.device:
    """Return a CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is bfloat16 where the hardware computes it.

    Raises:
        InvalidRequest: The name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if _computes_bf16(device) else torch.float32
    if name not in _DTYPES:
        raise InvalidRequest(f"--dtype: expected auto, {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def _computes_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(_BF16_FLAGS & cpu_flags(_CPUINFO))


def cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Return the feature flags of the first CPU in a /proc/cpuinfo; none where there is no file."""
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in {"flags", "features"}:
            return frozenset(value.split())
    return frozenset()
