"""What the translation from protobuf refuses before it copies anything."""

import pytest

from radixmesh.common.v1.sampling_pb2 import LogitBias, SamplingParams
from radixmesh.errors import BadSampling
from worker.front import wire


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        (SamplingParams(stop_token_ids=[5] * 64), True),
        (SamplingParams(stop_token_ids=[5] * 65), False),
        (SamplingParams(logit_bias=[LogitBias(token_id=5, bias=0.1)] * 1024), True),
        (SamplingParams(logit_bias=[LogitBias(token_id=5, bias=0.1)] * 1025), False),
    ],
)
def test_lists_that_are_too_long_are_refused(given: SamplingParams, fits: bool) -> None:
    given.seed, given.max_tokens = 1, 1
    if fits:
        wire.to_sampling(given, choice=0)
        return
    with pytest.raises(BadSampling, match="has more than"):
        wire.to_sampling(given, choice=0)


@pytest.mark.parametrize("missing", ["seed", "max_tokens"])
def test_what_must_be_set_is_asked_for(missing: str) -> None:
    given = SamplingParams(seed=1, max_tokens=1)
    given.ClearField(missing)  # type: ignore[arg-type]
    with pytest.raises(BadSampling, match=f"{missing} must be set"):
        wire.to_sampling(given, choice=0)
