"""Text <-> ids by the tokenizer of the model directory, which is loaded when first needed.

The only user of transformers here. Nothing is fetched from a hub and no code from the
directory is run. Encodings are those of the tokenizer service: neither cut nor filled up.
"""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixmesh.errors import InvalidRequest, MeshError


class Text:
    """A model's tokenizer. Its methods may be called from any thread."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._loading = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer.

        Raises:
            InvalidRequest: transformers is not installed, or the directory holds no tokenizer.
        """
        with self._loading:
            return self._loaded

    @functools.cached_property
    def _loaded(self) -> Any:
        try:
            # Not AutoTokenizer, whose import pulls in torch.
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(self._model_dir), local_files_only=True, trust_remote_code=False
            )
        except Exception as fault:
            raise InvalidRequest(f"no tokenizer in {self._model_dir}: {fault}") from fault
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        return tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int] | MeshError]:
        """Return the ids of each text, or why it has none.

        Raises:
            InvalidRequest: As `tokenizer`.
        """
        backend = self.tokenizer.backend_tokenizer
        try:
            return [each.ids for each in backend.encode_batch_fast(list(texts))]
        except Exception as fault:  # noqa: BLE001  # of any kind, and of one text
            if len(texts) == 1:
                return [InvalidRequest(f"the text can't be encoded: {fault}", field="prompts")]
        return [self.encode([text])[0] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return ids as text, without special tokens.

        Raises:
            InvalidRequest: As `tokenizer`.
        """
        text: str = self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> "TextStream":
        """Return a decoder of one output that comes in pieces."""
        return TextStream(self)


class TextStream:
    """Ids in, text out, so that the pieces together are what `Text.decode` says of all ids."""

    def __init__(self, text: Text) -> None:
        from tokenizers.decoders import DecodeStream

        self._text = text
        self._backend = text.tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._said = ""

    def step(self, ids: Sequence[int], *, last: bool) -> str:
        """Return the text that is certain now; with `last`, all that is left."""
        self._ids += ids
        pieces = [self._stream.step(self._backend, each) or "" for each in ids]
        if last:
            whole = self._text.decode(self._ids)
            said = self._said + "".join(pieces)
            rest = whole.removeprefix(said) if whole.startswith(said) else ""
            pieces.append(rest)
        piece = "".join(pieces)
        self._said += piece
        return piece
