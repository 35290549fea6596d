"""Bias, penalties and scores through a whole worker group: front, rank processes, fake engine."""

from pathlib import Path

import grpc.aio
import pytest

from radixmesh.blocks import pack_ids
from radixmesh.common.v1.sampling_pb2 import LogitBias, SamplingParams
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.oracle import (
    Wishes,
    oracle_likeliest,
    oracle_logprob,
    oracle_output,
    ordinary_ids,
)
from tests.fakes.router_end import attach
from tests.fakes.worker_front import run_front

pytestmark = [pytest.mark.e2e]

PROMPT = [10 + 7 * at % 90 for at in range(45)]
COUNT = 24


def asked(wishes: Wishes, **fields: object) -> SamplingParams:
    sampling = SamplingParams(
        seed=1,
        max_tokens=COUNT,
        ignore_eos=True,
        repetition_penalty=wishes.repetition,
        presence_penalty=wishes.presence,
        frequency_penalty=wishes.frequency,
        logit_bias=[LogitBias(token_id=number, bias=bias) for number, bias in wishes.bias],
    )
    sampling.MergeFrom(SamplingParams(**fields))  # type: ignore[arg-type]
    return sampling


async def generate(address: str, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with grpc.aio.insecure_channel(address) as channel:
        return [answer async for answer in WorkerServiceStub(channel).Generate(request)]


async def test_ids_and_scores_of_a_plain_call_are_exact(model_dir: Path) -> None:
    ordinary = ordinary_ids(model_dir)
    banned = tuple((number, -100.0) for number, _ in oracle_likeliest(PROMPT, ordinary, 3))
    wishes = Wishes(repetition=1.5, presence=0.5, bias=banned)
    sampling = asked(wishes, logprobs=True, top_logprobs=2, prompt_logprobs=True)
    request = pb.GenerateRequest(prompt_ids=PROMPT, sampling=sampling)
    async with run_front(model_dir, max_batched_tokens=16) as address:
        async with attach(address) as router:
            await router.until_up(0)
        answers = await generate(address, request)
        again = await generate(address, request)  # from the prefix cache, as far as it may
    ids = oracle_output(PROMPT, ordinary, COUNT, wishes)
    knowns = [PROMPT + ids[:at] for at in range(COUNT)]
    for each in (answers, again):
        assert [one for answer in each for one in answer.token_ids] == ids
        given = [value for answer in each for value in answer.logprobs]
        assert given == pytest.approx(
            [oracle_logprob(before, one, ordinary) for before, one in zip(knowns, ids, strict=True)]
        )
        assert [one for answer in each for one in answer.tops.token_ids] == [
            number for before in knowns for number, _ in oracle_likeliest(before, ordinary, 2)
        ]
        parts = [part for answer in each for part in answer.prompt_scores]
        assert [part.position for part in parts] == [
            1 + sum(len(part.logprobs) for part in parts[:at]) for at in range(len(parts))
        ]
        assert [value for part in parts for value in part.logprobs] == pytest.approx(
            [oracle_logprob(PROMPT[:at], PROMPT[at], ordinary) for at in range(1, len(PROMPT))]
        )
        assert [one for part in parts for one in part.tops.token_ids] == [
            number
            for at in range(1, len(PROMPT))
            for number, _ in oracle_likeliest(PROMPT[:at], ordinary, 2)
        ]
    assert len([answer for answer in answers if answer.prompt_scores]) > 1, "it came in chunks"


async def test_an_output_goes_on_elsewhere_as_it_would_have_here(model_dir: Path) -> None:
    ordinary = ordinary_ids(model_dir)
    every = {
        "plain": Wishes(),
        "presence": Wishes(presence=1.0),
        "all": Wishes(1.25, 0.5, -0.5, bias=((20, 100.0), (21, 100.0), (22, 100.0))),
    }
    async with run_front(model_dir, dp=2) as address, attach(address) as router:
        await router.until_up(0, 1)
        outputs = []
        for at, wishes in enumerate(every.values()):
            expected = oracle_output(PROMPT, ordinary, COUNT, wishes)
            entry = router.submit(PROMPT, dp_rank=0, sampling=asked(wishes))
            outputs.append((expected, entry))
            journal = expected[: 5 + at]
            moved = router.submit(
                PROMPT, dp_rank=1, sampling=asked(wishes), output_ids=pack_ids(journal)
            )
            moved.ids = list(journal)
            outputs.append((expected, moved))
        for expected, entry in outputs:
            assert await entry.result() == expected
