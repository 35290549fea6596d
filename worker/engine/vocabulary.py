"""What the fake engine knows of a model: its ids and limits, from two JSON files. No library."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixmesh.errors import InvalidRequest

_DEFAULT_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Ids of a model.

    Attributes:
        ordinary: Ids that are neither added nor special, rising.
        size: Ids run from 0 to this, exclusive.
        eos_ids: The model's own ends, rising.
        max_model_len: The model's context length.
    """

    ordinary: tuple[int, ...]
    size: int
    eos_ids: tuple[int, ...]
    max_model_len: int

    @classmethod
    def read(cls, model_dir: Path) -> "Vocabulary":
        """Read `tokenizer.json`, `config.json` and, where there is one, `generation_config.json`.

        Raises:
            InvalidRequest: A file is missing or has no vocabulary.
        """
        tokenizer = _read(model_dir / "tokenizer.json")
        config = _read(model_dir / "config.json")
        text = config.get("text_config", config)
        vocab = tokenizer.get("model", {}).get("vocab", {})
        known = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
        ordinary = sorted(known - {added["id"] for added in tokenizer.get("added_tokens", [])})
        if not ordinary:
            raise InvalidRequest(f"{model_dir / 'tokenizer.json'} has no vocabulary")
        size = max(text.get("vocab_size", 0), ordinary[-1] + 1)
        optional = model_dir / "generation_config.json"
        ends = _read(optional) if optional.is_file() else config
        return cls(
            ordinary=tuple(ordinary),
            size=size,
            eos_ids=_end_ids(ends, text),
            max_model_len=text.get("max_position_embeddings", _DEFAULT_MODEL_LEN),
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"can't read {path}: {error}", field="model") from error
    return parsed


def _end_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    for config in configs:
        ends = config.get("eos_token_id")
        if ends is not None:
            return tuple(sorted(ends)) if isinstance(ends, list) else (ends,)
    return ()
