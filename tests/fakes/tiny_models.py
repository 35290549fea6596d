"""Small random models of many families, made from their configs. Nothing is downloaded.

Weights are drawn wider than a fresh model's, so that greedy outputs vary and near
ties are rare. Knows transformers; knows nothing of the engine.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 200
MAX_MODEL_LEN = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Keys and values of different width.
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": MAX_MODEL_LEN,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


# As many heads as the default model has: they split unevenly.
NINE_HEADS: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def make_config(family: str, **changes: Any) -> Any:
    """Return the config of a tiny model of a family."""
    common = {} if family == "gpt2" else _COMMON
    return AutoConfig.for_model(family, **{**common, **FAMILIES.get(family, {}), **changes})


def make_tiny_model(
    folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """Write a model directory without a tokenizer, in float32; in files of a size."""
    config = make_config(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros, else, and nobody would miss them
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return what transformers itself generates greedily, in float32, ends ignored."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids
