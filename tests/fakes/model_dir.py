"""A small model directory, made in a second and the same every time. Holds no weights.

The tokenizer is a byte-level BPE trained on the text below, so it knows common
English, some code and a few pieces of other scripts, and falls back to bytes for
everything else. The config describes a tiny Llama that fits its vocabulary.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1000
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEXT = """\
The quick brown fox jumps over the lazy dog. A mesh is a net whose knots are machines and whose
cords are streams; when one cord breaks, the others carry its load. You are a helpful assistant.
Once upon a time there was a small model that lived in a cache. Every morning it woke up, looked at
the longest prefix that it already knew, and went on from there. What is the capital of France? The
capital of France is Paris. What is the capital of Japan? The capital of Japan is Tokyo. Please
write a short story about a river, a bridge, and a child who counts the boats that pass below. The
river was wide and slow. The bridge was old. The child counted one, two, three, four, five, six,
seven, eight, nine, ten boats, and then began again. In 1969 people walked on the moon; by 2024 the
machines had learned to write about it. Energy equals mass times the square of the speed of light.
To be, or not to be, that is the question. It was the best of times, it was the worst of times.
All happy families are alike; every unhappy family is unhappy in its own way. Call me whenever you
need something. How are you today? I am fine, thank you. Would you like some tea or some coffee?
Yes, please. Good morning, good afternoon, good evening, good night. Monday, Tuesday, Wednesday,
Thursday, Friday, Saturday, Sunday. January, February, March, April, May, June, July, August.
Router, worker, tokenizer, detokenizer: text goes in, numbers travel, text comes out again. Request
after request, token after token, block after block, the scheduler plans a step, runs the step, and
publishes what came of it. Nothing is lost, nothing is doubled, nothing is reordered.
def fibonacci(number: int) -> int:
    if number < 2:
        return number
    return fibonacci(number - 1) + fibonacci(number - 2)

class Stack:
    def __init__(self) -> None:
        self.items = []

    def push(self, item) -> None:
        self.items.append(item)

    def pop(self):
        return self.items.pop()

for index in range(10):
    print("index", index, {"key": [1, 2, 3], "value": None})
{"name": "mesh", "port": 30000, "groups": [{"dp": 2, "tp": 1}], "ready": true}
Große Straßen, grüne Bäume, schöne Lieder über den König, für Mädchen, für Jäger, für Füchse.
Le garçon a mangé une crêpe près de la forêt; où est passé l'été? Ça va très bien, merci beaucoup.
El niño pequeño soñó con una montaña. ¿Dónde está el baño? ¡Qué día tan bonito!
Привет, как дела? Всё хорошо, спасибо. Сегодня хорошая погода, и мы идём гулять в парк.
你好世界。今天天气很好。我们去公园散步吧。你好吗。我很好。谢谢你。世界很大。人很多。
こんにちは、世界。今日はとても良い天気ですね。ありがとうございます。日本語を話します。
안녕하세요 세계. 오늘은 날씨가 좋습니다. 감사합니다.
مرحبا بالعالم، كيف حالك اليوم؟ שלום עולם, מה שלומך היום? नमस्ते दुनिया, आप कैसे हैं?
😀 😀 👍 👍 🎉 🚀 🚀 ❤️ 👩‍👩‍👧 🇫🇷 naïve café résumé — “quotes” … • → ≠ ≤ € £
"""


def make_model_dir(path: Path) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

    Returns `path`, which is made when missing.
    """
    path.mkdir(parents=True, exist_ok=True)
    byte_level_bpe().save(str(path / "tokenizer.json"))
    _write(path / "tokenizer_config.json", _tokenizer_config())
    _write(path / "config.json", _model_config())
    _write(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]},
    )
    return path


def byte_level_bpe() -> Tokenizer:
    """Train the tokenizer. Ids 0 to 3 are special, the rest are ordinary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }


def _model_config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
