"""What a replica refuses, with which reason."""

from typing import Any

import msgspec
import pytest

from radixmesh.blocks import pack_ids
from radixmesh.errors import BadSampling, InvalidRequest, MeshError, PromptTooLong, UnknownToken
from tests.fakes.replica import namespace
from worker.request import Add, Sampling
from worker.schedule.check import check
from worker.schedule.limits import Limits

LIMITS = Limits(
    max_model_len=16,
    max_running=4,
    max_waiting=4,
    max_batched_tokens=8,
    vocab_size=100,
    eos_ids=frozenset((2,)),
)


def request(
    prompt: bytes = pack_ids([5]), output: bytes = b"", values: dict[str, Any] | None = None
) -> Add:
    drawn = Sampling(**{"seed": 1, "max_tokens": 8, **(values or {})})
    return Add(1, prompt, output, drawn, namespace())


@pytest.mark.parametrize(
    ("prompt", "output", "error"),
    [
        (b"", b"", InvalidRequest),
        (b"", pack_ids([5]), InvalidRequest),
        (b"\x01\x02\x03", b"", InvalidRequest),
        (pack_ids([5]), b"\x01", InvalidRequest),
        (pack_ids([100]), b"", UnknownToken),
        (pack_ids([2**32 - 1]), b"", UnknownToken),
        (pack_ids([5]), pack_ids([100]), UnknownToken),
        (pack_ids([5] * 16), b"", PromptTooLong),
        (pack_ids([5] * 5000), b"", PromptTooLong),
    ],
)
def test_ids_that_cannot_be_generated_from(
    prompt: bytes, output: bytes, error: type[MeshError]
) -> None:
    with pytest.raises(MeshError) as caught:
        check(request(prompt, output), LIMITS)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 100.5},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": -0.5},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"min_tokens": -1},
        {"min_tokens": 9},
        {"seed": -1},
        {"stop_ids": tuple(range(60))},
        {"stop_ids": (5,) * 65},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": float("-inf")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 100.5},
        {"repetition_penalty": float("nan")},
        {"logit_bias": ((5, 100.5),)},
        {"logit_bias": ((5, -1.0), (6, float("nan")))},
        {"logit_bias": ((5, float("inf")),)},
        {"logit_bias": tuple((one % 100, 1.0) for one in range(1025))},
        {"top_logprobs": -1},
        {"top_logprobs": 21},
    ],
)
def test_sampling_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(BadSampling):
        check(request(values=values), LIMITS)


@pytest.mark.parametrize("stop", [100, -1])
def test_a_stop_id_outside_the_vocabulary(stop: int) -> None:
    with pytest.raises(UnknownToken):
        check(request(values={"stop_ids": (stop,)}), LIMITS)


@pytest.mark.parametrize("biased", [100, -1])
def test_a_bias_of_an_id_outside_the_vocabulary(biased: int) -> None:
    with pytest.raises(UnknownToken):
        check(request(values={"logit_bias": ((5, 1.0), (biased, 1.0))}), LIMITS)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "top_k": 1000},
        {"seed": 2**64 - 1, "min_tokens": 8, "stop_ids": (99, 0)},
        {"max_tokens": 10**9},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 100.0},
        {"repetition_penalty": 1e-3, "top_logprobs": 20, "prompt_logprobs": True},
        {"logit_bias": tuple((one % 100, 100.0 - one % 201) for one in range(1024))},
    ],
)
def test_the_ends_of_the_ranges_are_in(values: dict[str, Any]) -> None:
    check(request(pack_ids([5] * 15), values=values), LIMITS)


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 31) - 1, 1 << 70])
def test_a_priority_that_no_wire_carries(priority: int) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        check(msgspec.structs.replace(request(), priority=priority), LIMITS)


@pytest.mark.parametrize("priority", [(1 << 31) - 1, -(1 << 31)])
def test_the_highest_and_the_lowest_priority(priority: int) -> None:
    check(msgspec.structs.replace(request(), priority=priority), LIMITS)
