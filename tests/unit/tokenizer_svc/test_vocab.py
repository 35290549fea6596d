"""Tokenizers are loaded from a directory alone; templates fail as typed errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.errors import InvalidRequest, TemplateFailed
from radixmesh.models import tokenizer_fingerprint
from tests.fakes.model_dir import BOS_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE, make_model_dir
from tokenizer_svc.vocab import Turn, Vocab


@pytest.fixture(scope="module")
def vocab(model_dir: Path) -> Vocab:
    return Vocab.load(model_dir)


def changed(path: Path, name: str, **changes: object) -> Path:
    """A model directory whose file of this name has other values; None takes a key out."""
    folder = make_model_dir(path / "model")
    content = json.loads((folder / name).read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))
    return folder


def test_a_vocabulary_knows_its_size_fingerprint_and_template(
    vocab: Vocab, model_dir: Path
) -> None:
    assert vocab.size == VOCAB_SIZE
    assert vocab.fingerprint == tokenizer_fingerprint(model_dir)
    assert vocab.has_chat_template


def test_text_becomes_ids_and_text_again(vocab: Vocab) -> None:
    texts = ["The quick brown fox", "", "naïve 世界 😀", "<|im_end|>"]
    encoded = [unpack_ids(ids) for ids in vocab.encode(texts, add_special_tokens=False)]
    assert [vocab.pieces.decode(ids, keep_special=True) for ids in encoded] == texts
    assert list(encoded[1]) == []
    assert list(encoded[3]) == [IM_END_ID]


def test_the_tokenizer_adds_its_begin_id_only_when_asked(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
    }
    vocab = Vocab.load(changed(tmp_path, "tokenizer.json", post_processor=template))
    (with_begin,) = vocab.encode(["fox"], add_special_tokens=True)
    (without,) = vocab.encode(["fox"], add_special_tokens=False)
    assert list(unpack_ids(with_begin)) == [BOS_ID, *unpack_ids(without)]


def test_a_truncation_or_padding_in_the_file_is_ignored(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    folder = changed(tmp_path, "tokenizer.json", truncation=truncation, padding=padding)
    vocab = Vocab.load(folder)
    (ids,) = vocab.encode(["the quick brown fox"], add_special_tokens=True)
    assert vocab.pieces.decode(unpack_ids(ids), keep_special=True) == "the quick brown fox"


def test_a_conversation_is_rendered_by_the_template(vocab: Vocab) -> None:
    turns = [Turn("system", "Be kind."), Turn("user", "hi")]
    text = vocab.render(turns, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert vocab.render(turns, add_generation_prompt=False) + "<|im_start|>assistant\n" == text
    (ids,) = vocab.encode([text], add_special_tokens=False)
    assert list(unpack_ids(ids)).count(IM_START_ID) == 3


def test_a_template_that_refuses_fails_with_its_own_words(vocab: Vocab) -> None:
    with pytest.raises(TemplateFailed, match="unknown role pirate"):
        vocab.render([Turn("pirate", "arr")], add_generation_prompt=True)


def test_a_missing_template_is_a_typed_error(tmp_path: Path) -> None:
    vocab = Vocab.load(changed(tmp_path, "tokenizer_config.json", chat_template=None))
    assert not vocab.has_chat_template
    with pytest.raises(TemplateFailed, match="no chat template"):
        vocab.render([Turn("user", "hi")], add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0].content.nowhere.deep }}",
        "{% for",
        "{{ messages[0]['content'] + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_stumbles_is_a_typed_error(tmp_path: Path, template: str) -> None:
    """The last one tries to leave the sandbox."""
    vocab = Vocab.load(changed(tmp_path, "tokenizer_config.json", chat_template=template))
    with pytest.raises(TemplateFailed) as caught:
        vocab.render([Turn("user", "hi")], add_generation_prompt=True)
    assert caught.value.field == "messages"


def test_a_directory_without_a_tokenizer_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no tokenizer in"):
        Vocab.load(tmp_path)


def test_loading_asks_nobody_and_runs_no_code_of_the_directory(tmp_path: Path) -> None:
    folder = changed(
        tmp_path,
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.Evil", None]},
        tokenizer_class="Evil",
        name_or_path="somebody/evil",
    )
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    script = (
        "import sys\n"
        "asked = []\n"
        "def hook(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.sendto'):\n"
        "        asked.append((event, arguments))\n"
        "sys.addaudithook(hook)\n"
        "from pathlib import Path\n"
        "from tokenizer_svc.vocab import Vocab\n"
        "vocab = Vocab.load(Path(sys.argv[1]))\n"
        "assert vocab.size == 1000 and not asked, asked\n"
        "assert 'torch' not in sys.modules and 'evil' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
