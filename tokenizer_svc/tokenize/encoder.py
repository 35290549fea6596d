"""Prompts become ids, many at a time; each fails alone. Knows a tokenizer; no threads, no wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from radixmesh.errors import InvalidRequest, MeshError, PromptTooLong
from tokenizer_svc.vocab import Turn, Vocab


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, encoded as it stands."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation; the template writes begin and end ids itself, so none are added."""

    turns: tuple[Turn, ...]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False


Prompt = TextPrompt | ChatPrompt

# What a template adds to a message, at the least; so empty messages are not free.
TURN_BYTES: Final = 16


def size_of(prompt: Prompt) -> int:
    """Return the bytes of a prompt as UTF-8; what a template adds is guessed low."""
    if isinstance(prompt, TextPrompt):
        return _bytes(prompt.text)
    turns = prompt.turns
    return sum(TURN_BYTES + _bytes(turn.role) + _bytes(turn.content) for turn in turns)


class Encoder:
    """Encodes prompts of a bounded size."""

    def __init__(self, vocab: Vocab, *, prompt_bytes_limit: int) -> None:
        self._vocab = vocab
        self.prompt_bytes_limit = prompt_bytes_limit

    def check(self, prompt: Prompt) -> int:
        """Return the prompt's bytes, or refuse it before any work is done.

        Raises:
            PromptTooLong: It has more bytes than the limit.
            InvalidRequest: A conversation without messages.
        """
        if isinstance(prompt, ChatPrompt) and not prompt.turns:
            raise InvalidRequest("a conversation needs at least one message", field="messages")
        return self._check_size(size_of(prompt))

    def _check_size(self, size: int) -> int:
        if size > self.prompt_bytes_limit:
            raise PromptTooLong(
                f"the prompt has {size} bytes, at most {self.prompt_bytes_limit} are taken",
                field="prompt",
                limit=self.prompt_bytes_limit,
            )
        return size

    def encode(self, prompts: Sequence[Prompt]) -> list[bytes | MeshError]:
        """Return the ids (little-endian uint32) or the error of each prompt, in order."""
        results: list[bytes | MeshError] = [b""] * len(prompts)
        texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for place, prompt in enumerate(prompts):
            try:
                texts[prompt.add_special_tokens].append((place, self._text(prompt)))
            except MeshError as error:
                results[place] = error
        for add_special_tokens, group in texts.items():
            encoded = self._encode([text for _, text in group], add_special_tokens)
            for (place, _), result in zip(group, encoded, strict=True):
                results[place] = result
        return results

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        text = self._vocab.render(prompt.turns, add_generation_prompt=prompt.add_generation_prompt)
        self._check_size(_bytes(text))
        return text

    def _encode(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> Sequence[bytes | MeshError]:
        if not texts:
            return []
        try:
            return self._vocab.encode(texts, add_special_tokens=add_special_tokens)
        except MeshError as error:
            if len(texts) == 1:
                return [error]
        # One of them is at fault: try each by itself.
        return [result for text in texts for result in self._encode([text], add_special_tokens)]


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
