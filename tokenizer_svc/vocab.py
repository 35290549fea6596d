"""A model's tokenizer, loaded from its directory. The only importer of transformers here.

Knows text, ids and chat templates; knows no queue and no wire. tokenizer.json is
taken as it stands, because its hash is what tokenizer and workers compare; so the
loader is the class behind AutoTokenizer that reads this file, not AutoTokenizer,
whose import also pulls in torch where that is installed. Nothing is fetched from a
hub and no code from the directory is run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from radixmesh.blocks import pack_ids
from radixmesh.errors import InvalidRequest, TemplateFailed
from radixmesh.models import tokenizer_fingerprint
from tokenizer_svc.guard import guarded
from tokenizer_svc.pieces import Pieces


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


class Vocab:
    """One loaded tokenizer.

    Attributes:
        fingerprint: SHA-256 of tokenizer.json, hex.
        has_chat_template: Whether conversations can be rendered.
        pieces: What each id is worth as text.
    """

    def __init__(self, tokenizer: Any, *, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # An encoding is exact: never cut, never filled up, whatever the file says.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.fingerprint = fingerprint
        self.has_chat_template = bool(tokenizer.chat_template)
        self.pieces = Pieces(self._backend)

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Load the tokenizer of a Hugging Face directory.

        Raises:
            InvalidRequest: The directory holds none that can be loaded.
        """
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(model_dir), local_files_only=True, trust_remote_code=False
            )
            fingerprint = tokenizer_fingerprint(model_dir)
        except Exception as error:
            raise InvalidRequest(f"no tokenizer in {model_dir}: {error}") from error
        return cls(tokenizer, fingerprint=fingerprint)

    @property
    def size(self) -> int:
        """Ids run from 0 to this, exclusive; added ids included."""
        return self.pieces.size

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the ids of each text, little-endian uint32. Releases the GIL while it works.

        Raises:
            InternalError: The tokenizer failed on one of them.
        """
        with guarded("encode"):
            # encode_batch releases the GIL, encode doesn't; `fast` leaves out offsets.
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [pack_ids(encoding.ids) for encoding in encodings]

    def render(self, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
        """Return a conversation as the text that the model's chat template makes of it.

        The template runs in transformers' sandbox.

        Raises:
            TemplateFailed: There is no template, or it refused the conversation.
        """
        if not self.has_chat_template:
            raise TemplateFailed("the model has no chat template", field="messages")
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise TemplateFailed(f"the chat template refused: {error}", field="messages") from error
        except Exception as error:
            # Templates are programs: what they stumble over is the conversation.
            raise TemplateFailed(
                f"the chat template failed: {type(error).__name__}: {error}", field="messages"
            ) from error
        return str(text)
