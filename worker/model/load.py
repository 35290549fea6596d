"""Loads a model directory as transformers' module, on the device and in the dtype to use.

A rank that is alone takes the module as transformers loads it, of any architecture; one
of several takes its shard (`shard.py`). Knows transformers and what the CPU can do; knows
no KV cache and no batch. It never asks a hub.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from radixmesh.errors import InvalidRequest
from radixmesh.settings import stay_offline
from worker.model.checkpoint import Part
from worker.model.shard import build_shard, fill, read_parts
from worker.model.support import check_config, choose_max_model_len
from worker.parallel.split import Seat, Shard

logger = logging.getLogger(__name__)

_ALONE = Seat()
_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute.

    Attributes:
        module: transformers' causal language model, in eval mode.
        config: Its text config.
        attention: Name of its attention function.
        width: Of the activations between layers.
        layers: How many layers attend on this rank.
        eos_ids: Ids that end an output.
        vocab_size: Width of the logits of all ranks together.
        shard: What of the model this rank has; None: all of it.
        parts: Where each parameter of a shard comes from.
    """

    module: Any
    config: Any
    attention: str
    width: int
    layers: int
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    shard: Shard | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def embeds(self) -> bool:
        """Whether this rank's stage begins with ids, not with activations."""
        return self.shard is None or self.shard.embeds

    @property
    def draws(self) -> bool:
        """Whether this rank's stage ends with logits, not with activations."""
        return self.shard is None or self.shard.draws

    @property
    def vocabularies(self) -> tuple[range, ...]:
        """Of each tp rank, the ids of which it computes the logits, where its stage does."""
        return (range(self.vocab_size),) if self.shard is None else self.shard.vocabularies


def load_model(
    folder: Path,
    *,
    attention: str,
    dtype: str = "auto",
    max_model_len: int = 0,
    device_index: int,
    seat: Seat = _ALONE,
) -> LoadedModel:
    """Load a Hugging Face directory, or what a rank needs of it.

    Args:
        folder: Where config.json and the safetensors lie.
        attention: Name of a registered attention function.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        max_model_len: Longest sequence; 0 means the model's limit.
        device_index: Which of this process's CUDA devices, modulo their number; unused
            on the CPU.
        seat: Which rank of how many this is.

    Raises:
        InvalidRequest: The directory cannot be loaded, or a setting does not fit it.
        NotSupported: The model needs what this engine does not do.
    """
    device = choose_device(device_index)
    chosen = choose_dtype(dtype, device)
    config = read_config(folder)
    text = config.get_text_config(decoder=True)
    length = choose_max_model_len(text, max_model_len)
    check_config(text, length)
    shard, parts = None, dict[str, Part]()
    if seat.alone:
        module = load_whole(folder, attention, chosen).to(device)
        generation = module.generation_config
    else:
        module, shard, parts = build_shard(config, seat, attention)
        tensors, bytes_read = read_parts(folder, parts, chosen)
        logger.info("shard read", extra={"bytes": bytes_read, "tensors": len(tensors)})
        fill(module, tensors, device)
        module.to(device)  # what was made of the config
        generation = _generation_config(folder)
    return LoadedModel(
        module=module.eval(),
        config=text,
        attention=attention,
        width=text.hidden_size,
        layers=text.num_hidden_layers if shard is None else len(shard.layers),
        dtype=chosen,
        device=device,
        max_model_len=length,
        vocab_size=text.vocab_size,
        eos_ids=_eos_ids(generation, text),
        shard=shard,
        parts=parts,
    )


def read_config(folder: Path) -> Any:
    """Return transformers' config of a directory.

    Raises:
        InvalidRequest: It cannot be read.
    """
    stay_offline()
    from transformers import AutoConfig
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"--model: cannot read the config of {folder}: {error}") from error


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None  # the model's config says it, then


def load_whole(folder: Path, attention: str, dtype: torch.dtype) -> Any:
    """Return the whole model as transformers loads it, on the CPU.

    Raises:
        InvalidRequest: A weight is not there or does not fit, or a file cannot be read.
    """
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
