"""Prompts of a batch are encoded together and fail alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.errors import InternalError, InvalidRequest, MeshError, PromptTooLong, TemplateFailed
from tests.fakes.model_dir import IM_START_ID
from tokenizer_svc.tokenize.encoder import TURN_BYTES, ChatPrompt, Encoder, TextPrompt
from tokenizer_svc.vocab import Turn, Vocab


@pytest.fixture(scope="module")
def vocab(model_dir: Path) -> Vocab:
    return Vocab.load(model_dir)


@pytest.fixture
def encoder(vocab: Vocab) -> Encoder:
    return Encoder(vocab, prompt_bytes_limit=100)


def chat(role: str, content: str) -> ChatPrompt:
    return ChatPrompt((Turn(role, content),))


def text_of(vocab: Vocab, result: bytes | MeshError) -> str:
    assert isinstance(result, bytes)
    return vocab.pieces.decode(unpack_ids(result), keep_special=True)


def test_a_batch_keeps_its_order_whatever_is_in_it(vocab: Vocab, encoder: Encoder) -> None:
    results = encoder.encode(
        [
            TextPrompt("one", add_special_tokens=False),
            chat("user", "two"),
            TextPrompt("three"),
            chat("pirate", "arr"),
            TextPrompt(""),
        ]
    )
    assert text_of(vocab, results[0]) == "one"
    assert text_of(vocab, results[1]).startswith("<|im_start|>user\ntwo")
    assert text_of(vocab, results[2]) == "three"
    assert isinstance(results[3], TemplateFailed)
    assert results[4] == b""
    assert isinstance(results[1], bytes)
    assert unpack_ids(results[1])[0] == IM_START_ID


def test_a_prompt_over_the_limit_is_refused_before_any_work(encoder: Encoder) -> None:
    assert encoder.check(TextPrompt("é" * 50)) == 100
    with pytest.raises(PromptTooLong) as caught:
        encoder.check(TextPrompt("é" * 50 + "!"))
    assert caught.value.metadata == {"limit": "100"}
    with pytest.raises(PromptTooLong):
        encoder.check(chat("user", "x" * 100))


def test_empty_messages_are_not_free(encoder: Encoder) -> None:
    assert encoder.check(ChatPrompt((Turn("", ""),) * 2)) == 2 * TURN_BYTES
    with pytest.raises(PromptTooLong):
        encoder.check(ChatPrompt((Turn("", ""),) * 100))


def test_a_conversation_that_a_template_blows_up_is_refused(encoder: Encoder) -> None:
    prompt = ChatPrompt((Turn("user", "hello"), Turn("assistant", "hi"), Turn("user", "bye")))
    assert encoder.check(prompt) <= 100
    (result,) = encoder.encode([prompt])
    assert isinstance(result, PromptTooLong)


def test_a_conversation_needs_a_message(encoder: Encoder) -> None:
    with pytest.raises(InvalidRequest):
        encoder.check(ChatPrompt(()))


class PickyVocab(Vocab):
    """Fails any batch that holds one text, as a fault of the library does."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        if "poison" in texts:
            raise InternalError("the tokenizer failed")
        return super().encode(texts, add_special_tokens=add_special_tokens)


def test_a_text_that_breaks_its_batch_fails_alone(model_dir: Path) -> None:
    """B57."""
    vocab = PickyVocab.load(model_dir)
    encoder = Encoder(vocab, prompt_bytes_limit=100)
    good, bad, other = encoder.encode(
        [TextPrompt("good"), TextPrompt("poison"), TextPrompt("other")]
    )
    assert isinstance(bad, InternalError)
    assert [text_of(vocab, good), text_of(vocab, other)] == ["good", "other"]
