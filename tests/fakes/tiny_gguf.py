"""A tiny GGUF file: a random Llama with the tokenizer of `model_dir`. Knows the gguf writer."""

import json
from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 32, 4, 2, 8, 64
CONTEXT = 512


def make_gguf(path: Path, model_dir: Path) -> Path:
    """Write a GGUF with the vocabulary, merges and chat template of a model directory."""
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    size = _add_tokenizer(writer, tokenizer)
    writer.add_chat_template(config["chat_template"])
    _add_weights(writer, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, dict[str, object]]) -> int:
    model = tokenizer["model"]
    vocab, merges = model["vocab"], model["merges"]
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]  # type: ignore[attr-defined]
    added = {entry["content"] for entry in tokenizer["added_tokens"]}  # type: ignore[index]
    kinds = gguf.TokenType
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in added else kinds.NORMAL for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])  # type: ignore[attr-defined]
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    return len(tokens)


def _add_weights(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    random = np.random.default_rng(5)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.2, shape).astype(np.float32))

    add("token_embd.weight", vocabulary, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add(f"{prefix}attn_norm.weight", HIDDEN)
        add(f"{prefix}ffn_norm.weight", HIDDEN)
        add(f"{prefix}attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        add(f"{prefix}attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{prefix}attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{prefix}attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        add(f"{prefix}ffn_gate.weight", FFN, HIDDEN)
        add(f"{prefix}ffn_up.weight", FFN, HIDDEN)
        add(f"{prefix}ffn_down.weight", HIDDEN, FFN)
