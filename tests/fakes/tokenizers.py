"""One small tokenizer of each family that models use. Made by hand, so ids can be hostile.

Every vocabulary has pieces of several scripts, pieces that are nothing but spaces,
an empty-looking one, a special token and an added ordinary one.
"""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.fakes.model_dir import byte_level_bpe

PIECES = (
    "▁", "▁▁", "▁Hello", "▁world", "▁a", "a", "ing", "lo", "世", "▁世界", "é", "\u0301", "😀", "👩",
    "\u200d", "\ufffd", ".", "▁.", ",", "'s", "▁do", "n't", "▁n't", " ", "  ", "\n", "<0xG1>",
)  # fmt: skip
WORD_PIECES = (
    "hello", "##ing", "##", "##.", ".", "?", "!", "世", "##界", "é", "##\u0301", "😀", "do", "n't",
    "'s", "not", "a", "##a", "'", "##'",
)  # fmt: skip
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPECIAL = "</s>"
ADDED = "<tool call>"


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM."""
    return _finished(byte_level_bpe())


def sentencepiece_bpe(*, strip: bool = True) -> Tokenizer:
    """Llama 2 and Mistral; without `strip`, Gemma."""
    vocab = {piece: place for place, piece in enumerate(("<unk>", *BYTES, *PIECES))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)
    return _finished(tokenizer)


def unigram(*, byte_fallback: bool = False) -> Tokenizer:
    """T5 and XLM-R, by the Metaspace decoder."""
    pieces = ("<unk>", *BYTES, *PIECES) if byte_fallback else ("<unk>", *PIECES)
    scored = [(piece, -float(place)) for place, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, 0, byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace = decoders.Metaspace()
    tokenizer.decoder = (
        decoders.Sequence([metaspace, decoders.ByteFallback(), decoders.Fuse()])
        if byte_fallback
        else metaspace
    )
    return _finished(tokenizer)


def word_piece() -> Tokenizer:
    """BERT."""
    vocab = {piece: place for place, piece in enumerate(("[UNK]", *WORD_PIECES))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _finished(tokenizer)


def without_decoder() -> Tokenizer:
    """Whole words, joined by spaces."""
    vocab = {piece: place for place, piece in enumerate(("[UNK]", *WORD_PIECES))}
    return _finished(Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")))


def bpe_with_suffix() -> Tokenizer:
    """The first GPT: a piece's text depends on whether it is the last one."""
    vocab = {piece: place for place, piece in enumerate(("<unk>", "a</w>", "b", "c</w>"))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return _finished(tokenizer)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "SentencePiece BPE": sentencepiece_bpe,
    "SentencePiece BPE without strip": lambda: sentencepiece_bpe(strip=False),
    "Unigram": unigram,
    "Unigram with bytes": lambda: unigram(byte_fallback=True),
    "WordPiece": word_piece,
    "no decoder": without_decoder,
}


def broken_decoder() -> Tokenizer:
    """A decoder that panics in Rust on an empty text."""
    tokenizer = without_decoder()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    tokenizer.add_special_tokens([AddedToken("", special=False)])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the vocabulary has."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise LookupError(token)
    return token_id


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """Return the ids of single bytes, in whichever way the vocabulary writes them."""
    if tokenizer.token_to_id(BYTES[0]) is not None:
        return [id_of(tokenizer, BYTES[byte]) for byte in raw]
    # Byte-level: printable bytes stand for themselves, the others follow in order above.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    above = iter(sorted(char for char in alphabet if ord(char) > 0xFF))
    chars = [chr(byte) if chr(byte) in alphabet else next(above) for byte in range(256)]
    return [id_of(tokenizer, chars[byte]) for byte in raw]
