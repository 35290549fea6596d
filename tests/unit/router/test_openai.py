"""What of an OpenAI request body is read, and what is refused by name."""

import json
import struct
from typing import Any

import pytest

from radixmesh.errors import InvalidRequest, UnsupportedParameter
from router.edge.openai import Ask, read_chat, read_completion
from router.request import ChatMessage, ChatPrompt, IdsPrompt, Sampling, TextPrompt

USER = {"role": "user", "content": "hi"}


def chat(**extra: Any) -> Ask:
    return read_chat(json.dumps({"messages": [USER]} | extra).encode())


def complete(prompt: Any = "hi", **extra: Any) -> Ask:
    return read_completion(json.dumps({"prompt": prompt} | extra).encode())


def test_a_bare_chat_takes_all_defaults() -> None:
    request = chat().requests[0]
    assert request.prompt == ChatPrompt((ChatMessage("user", "hi"),))
    assert request.sampling == Sampling()
    assert (request.stop, request.choices, request.model) == ((), 1, "")


def test_every_supported_parameter_reaches_the_request() -> None:
    ask = chat(
        model="m",
        max_completion_tokens=9,
        temperature=0,
        top_p=0.5,
        n=2,
        stop=["a", "b"],
        seed=5,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        user="u",
        metadata={"k": "v"},
        logprobs=True,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"7": -100, "0": 2.5},
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=[4],
        cache_salt="s",
        priority=-7,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        add_generation_prompt=False,
    )
    request = ask.requests[0]
    assert (ask.stream, ask.include_usage) == (True, True)
    assert request.sampling == Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=5,
        max_tokens=9,
        min_tokens=1,
        stop_token_ids=(4,),
        ignore_eos=True,
        logprobs=True,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        logit_bias=((7, -100.0), (0, 2.5)),
    )
    assert request.prompt == ChatPrompt((ChatMessage("user", "hi"),), add_generation_prompt=False)
    assert (request.model, request.stop, request.choices) == ("m", ("a", "b"), 2)
    assert (request.priority, request.tenant, request.cache_salt) == (-7, "u", "s")
    assert (request.include_stop, request.keep_special_tokens) == (True, True)


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("tools", [], [{"type": "function"}]),
        ("tool_choice", "none", "auto"),
        ("parallel_tool_calls", True, False),
        ("functions", [], [{}]),
        ("function_call", "none", "auto"),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("top_logprobs", 0, 1),
        ("audio", None, {"voice": "x"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("prediction", None, {"type": "content"}),
        ("reasoning_effort", "none", "high"),
        ("service_tier", "auto", "flex"),
        ("store", False, True),
        ("prompt_cache_retention", None, "24h"),
        ("verbosity", "medium", "low"),
        ("web_search_options", None, {}),
    ],
)
def test_an_unsupported_parameter_passes_only_at_its_neutral_value(
    name: str, neutral: object, asking: object
) -> None:
    assert chat(**{name: neutral}) == chat()
    assert chat(**{name: None}) == chat()
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**{name: asking})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "neutral", "asking"), [("best_of", 1, 2), ("echo", False, True), ("suffix", "", "x")]
)
def test_the_same_holds_for_the_parameters_of_completions(
    name: str, neutral: object, asking: object
) -> None:
    assert complete(**{name: neutral}) == complete()
    with pytest.raises(UnsupportedParameter) as caught:
        complete(**{name: asking})
    assert caught.value.field == name


def test_both_apis_take_penalties_and_bias() -> None:
    extra = {"presence_penalty": 1, "frequency_penalty": 0.25, "logit_bias": {"5": -1}}
    sampling = complete(**extra).requests[0].sampling
    assert sampling == chat(**extra).requests[0].sampling
    assert sampling.logit_bias == ((5, -1.0),)
    assert complete(logit_bias={}, presence_penalty=None) == complete()


@pytest.mark.parametrize("value", [None, 0, "", "x", {}])
def test_an_unknown_parameter_is_refused_whatever_its_value(value: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(guided_json=value)
    assert caught.value.field == "guided_json"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("max_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("seed", 2**64),
        ("min_p", 2),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("presence_penalty", 2.1),
        ("presence_penalty", True),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {str(2**32): 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("min_tokens", -1),
        ("priority", 101),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stream", "yes"),
        ("metadata", {"k": 1}),
        ("logprobs", 1),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [USER] * 10_001),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{name: value})
    assert caught.value.field.split(".")[0] == name


def test_null_means_not_set() -> None:
    assert chat(temperature=None, stop=None, n=None, seed=None, stream=None) == chat()


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = chat(messages=[{"role": "user", "content": parts}]).requests[0].prompt
    assert prompt == ChatPrompt((ChatMessage("user", "ab"),))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": "n"}, "messages[0].name"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]},
            "messages[0].content[0].cache",
        ),
        ("hi", "messages[0]"),
    ],
)
def test_what_a_message_cannot_say_is_refused_by_its_place(message: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[message])
    assert caught.value.field == field


def test_an_answer_can_be_sent_back_as_history() -> None:
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    prompt = chat(messages=[USER, answer, USER]).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == ChatMessage("assistant", "hello")


def test_a_developer_speaks_as_the_system() -> None:
    prompt = chat(messages=[{"role": "developer", "content": "x"}]).requests[0].prompt
    assert prompt == ChatPrompt((ChatMessage("system", "x"),))


def test_two_different_limits_contradict_each_other() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    with pytest.raises(InvalidRequest):
        chat(max_tokens=5, max_completion_tokens=6)


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(stream_options={"include_usage": True})
    assert caught.value.field == "stream_options"


def test_a_negative_seed_is_taken_modulo_two_to_the_64() -> None:
    assert chat(seed=-1).requests[0].sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("text", (TextPrompt("text"),)),
        (["one"], (TextPrompt("one"),)),
        (["one", "two"], (TextPrompt("one"), TextPrompt("two"))),
        ([1, 2**32 - 1], (IdsPrompt(struct.pack("<2I", 1, 2**32 - 1)),)),
        ([[1], [2, 3]], (IdsPrompt(struct.pack("<I", 1)), IdsPrompt(struct.pack("<2I", 2, 3)))),
    ],
)
def test_a_prompt_is_text_or_ids_one_or_many(given: object, read: object) -> None:
    assert tuple(request.prompt for request in complete(given).requests) == read


@pytest.mark.parametrize("given", [[], [[]], [-1], [2**32], [1.5], [1, "x"], {"a": 1}, 7, [["x"]]])
def test_any_other_prompt_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(given)
    assert caught.value.field == "prompt"


def test_a_batch_is_bounded_by_its_outputs() -> None:
    assert len(complete(["x"] * 64, n=2).requests) == 64
    with pytest.raises(InvalidRequest):
        complete(["x"] * 65, n=2)


def test_logprobs_of_a_completion_mean_the_chosen_ids_only() -> None:
    assert not complete().requests[0].sampling.logprobs
    assert complete(logprobs=0).requests[0].sampling.logprobs
    assert complete(logprobs=1).requests[0].sampling.logprobs
    with pytest.raises(UnsupportedParameter) as caught:
        complete(logprobs=2)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"messages":' + b"[" * 100_000,
    ],
)
def test_a_broken_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_chat(body)
