"""Checks before work: what could harm a replica is refused by name."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh import errors
from radixmesh.blocks import Namespace, pack_ids
from worker.front.ask import Ask, GroupInfo, to_add
from worker.request import Sampling

INFO = GroupInfo(
    model="tiny",
    weight_version="",
    fingerprint="f" * 64,
    engine="fake",
    dp=1,
    pp=1,
    tp=1,
    max_running=4,
    max_waiting=8,
    max_batched_tokens=64,
    block_tokens=16,
    kv_blocks=64,
    max_model_len=100,
    vocab_size=50,
    eos_ids=(1,),
)
FINE = Sampling(seed=1, max_tokens=10)


def ask(**changes: object) -> Ask:
    return Ask(**{"prompt": pack_ids([1, 2, 3]), "sampling": FINE, **changes})  # type: ignore[arg-type]


def check(asked: Ask) -> None:
    to_add(asked, INFO, request_id=1)


def test_an_ordinary_request_is_passed_on_as_it_is() -> None:
    asked = ask(fingerprint=INFO.fingerprint, output=pack_ids([4]), priority=3, timeout_ms=50)
    add = to_add(asked, INFO, request_id=9)
    assert (add.request_id, add.prompt, add.output) == (9, asked.prompt, asked.output)
    assert (add.sampling, add.priority, add.timeout_ms) == (FINE, 3, 50)


def test_salts_have_namespaces_of_their_own() -> None:
    one = to_add(ask(cache_salt="a"), INFO, request_id=1).namespace
    other = to_add(ask(cache_salt="b"), INFO, request_id=2).namespace
    assert one == Namespace(model="tiny", fingerprint="f" * 64, cache_salt="a").encode()
    assert one != other


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"fingerprint": "0" * 64}, errors.TokenizerMismatch),
        ({"prompt": b""}, errors.InvalidRequest),
        ({"prompt": b"12345"}, errors.InvalidRequest),
        ({"output": b"123"}, errors.InvalidRequest),
        ({"prompt": pack_ids([50])}, errors.UnknownToken),
        ({"output": pack_ids([2**32 - 1])}, errors.UnknownToken),
        ({"prompt": pack_ids([1] * 100)}, errors.PromptTooLong),
        ({"output": pack_ids([1] * 98)}, errors.PromptTooLong),
        ({"adapter": "poet"}, errors.UnsupportedParameter),
        ({"cache_salt": "s" * 1025}, errors.InvalidRequest),
    ],
)
def test_a_bad_request_is_refused_by_type(
    changes: dict[str, object], error: type[errors.MeshError]
) -> None:
    with pytest.raises(error) as raised:
        check(ask(**changes))
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"max_tokens": 0},
        {"min_tokens": 11},
        {"stop_ids": tuple(range(300))},
    ],
)
def test_sampling_out_of_range_is_refused_with_the_field(changes: dict[str, object]) -> None:
    sampling = msgspec.structs.replace(FINE, **changes)
    with pytest.raises(errors.BadSampling) as raised:
        check(ask(sampling=sampling))
    assert raised.value.field in {"stop_token_ids", *changes}


def test_a_stop_id_outside_the_vocabulary_is_refused() -> None:
    sampling = msgspec.structs.replace(FINE, stop_ids=(50,))
    with pytest.raises(errors.UnknownToken):
        check(ask(sampling=sampling))


@given(prompt=st.binary(max_size=64), output=st.binary(max_size=16))
def test_arbitrary_bytes_either_pass_or_raise_a_typed_error(prompt: bytes, output: bytes) -> None:
    try:
        check(ask(prompt=prompt, output=output))
    except errors.InvalidRequest:
        return
    assert len(prompt) % 4 == 0
    assert len(output) % 4 == 0
