"""A worker group's link, over a real channel, with ranks that the test plays."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from radixmesh import errors
from radixmesh.blocks import Namespace, pack_ids
from radixmesh.common.v1.sampling_pb2 import LogitBias, SamplingParams
from radixmesh.models import tokenizer_fingerprint
from radixmesh.worker.v1.worker_service_pb2 import PromptScores, Submit, Tops
from tests.fakes.router_end import DOWN, UP, RouterEnd, attach
from tests.fakes.scripted_ranks import Row, ScriptedLauncher, ScriptedRanks
from tests.fakes.worker_front import run_front
from worker import request
from worker.request import (
    LENGTH,
    STOP_TOKEN,
    Answer,
    CacheChange,
    CacheDigest,
    Failed,
    Sampling,
    Started,
)


@asynccontextmanager
async def group(
    model_dir: Path, *, dp: int = 1, routers: int = 1, **flags: Any
) -> AsyncGenerator[tuple[list[RouterEnd], list[ScriptedRanks]], None]:
    """A group whose replicas are up, and routers that see them so."""
    launcher = ScriptedLauncher()
    async with AsyncExitStack() as stack:
        front = run_front(model_dir, launch=launcher, dp=dp, **flags)
        address = await stack.enter_async_context(front)
        ends = [
            await stack.enter_async_context(attach(address, f"router{number}"))
            for number in range(routers)
        ]
        for end in ends:
            await end.until_up(*range(dp))
        yield ends, [await launcher.incarnation(each, 0) for each in range(dp)]


async def test_the_first_frame_describes_the_group(model_dir: Path) -> None:
    async with group(model_dir, dp=2, model_name="poet", weight_version="w1") as ([router], ranks):
        info = router.info
        assert info is not None
        assert (info.model, info.weight_version, info.engine) == ("poet", "w1", "fake")
        assert info.fingerprint == tokenizer_fingerprint(model_dir)
        assert (info.topology.dp, info.topology.pp, info.topology.tp) == (2, 1, 1)
        assert info.block_tokens == 16
        assert info.limits.kv_blocks == 256
        assert info.limits.max_model_len == 512
        assert list(info.limits.eos_token_ids) == [1]
        incarnations = {router.statuses[each].incarnation for each in (0, 1)}
        assert incarnations == {each.incarnation for each in ranks}


async def test_a_request_goes_to_the_ranks_as_it_is_and_its_output_comes_back(
    model_dir: Path,
) -> None:
    async with group(model_dir, model_name="poet") as ([router], [ranks]):
        output = router.submit([5, 6, 7], max_tokens=3, cache_salt="tenant", priority=2, choice=4)
        [add] = await ranks.adds(1)
        assert add.prompt == pack_ids([5, 6, 7])
        assert add.priority == 2
        assert add.sampling.choice == 4
        assert add.sampling.max_tokens == 3
        fingerprint = tokenizer_fingerprint(model_dir)
        namespace = Namespace(model="poet", fingerprint=fingerprint, cache_salt="tenant")
        assert add.namespace == namespace.encode()
        ranks.step(accepted=[add.request_id], started=[Started(add.request_id, 16, 250)])
        ranks.step([Row(add.request_id, 0, [10, 11])])
        ranks.step([Row(add.request_id, 2, [12], finish=LENGTH)])
        assert await output.result() == [10, 11, 12]
        assert output.accepted
        assert output.started is not None
        assert (output.started.cached_tokens, output.started.waited_us) == (16, 250)
        assert output.finish == LENGTH
        assert not router.link.entries


async def test_every_way_to_draw_reaches_the_ranks_and_unset_means_the_default(
    model_dir: Path,
) -> None:
    asked = SamplingParams(
        seed=1, max_tokens=3, top_p=0.5, top_k=4, min_p=0.25, min_tokens=2, stop_token_ids=[7],
        ignore_eos=True, logprobs=True, top_logprobs=5, prompt_logprobs=True,
        repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=0.75,
        logit_bias=[LogitBias(token_id=8, bias=-100), LogitBias(token_id=9, bias=0.5)],
    )  # fmt: skip
    async with group(model_dir) as ([router], [ranks]):
        for number, sampling in enumerate((asked, SamplingParams(seed=1, max_tokens=3)), 1):
            submit = Submit(entry_id=number, prompt_ids=pack_ids([5]), choice=6, sampling=sampling)
            router.send(submit)
        full, plain = await ranks.adds(2)
    assert full.sampling == Sampling(
        seed=1, choice=6, max_tokens=3, top_p=0.5, top_k=4, min_p=0.25, min_tokens=2,
        stop_ids=(7,), ignore_eos=True, logprobs=True, top_logprobs=5, prompt_logprobs=True,
        repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=0.75,
        logit_bias=((8, -100.0), (9, 0.5)),
    )  # fmt: skip
    assert plain.sampling == Sampling(seed=1, choice=6, max_tokens=3)


async def test_scores_go_to_the_router_that_asked_under_its_own_numbers(model_dir: Path) -> None:
    async with group(model_dir, routers=2) as ([one, other], [ranks]):
        other.submit([9])  # so that the two number their entries apart
        first, second = one.submit([5, 6]), other.submit([50])
        adds = {add.prompt: add.request_id for add in await ranks.adds(3)}
        mine, theirs = adds[pack_ids([5, 6])], adds[pack_ids([50])]
        ranks.step(
            [Row(theirs, 0, [7], LENGTH), Row(mine, 0, [8], LENGTH)],
            logprobs=[float("nan"), -0.5],
            tops=request.Tops([0, 2], [8, 3], [-0.5, -2.0]),
            prompt_scores=[request.PromptScores(mine, 1, [-0.25], request.Tops())],
        )
        assert await first.result() == [8]
        assert await second.result() == [7]
    assert list(one.last_step.logprobs) == [-0.5]
    assert one.last_step.tops == Tops(counts=[2], token_ids=[8, 3], logprobs=[-0.5, -2.0])
    assert list(one.last_step.prompt_scores) == [
        PromptScores(entry_id=first.entry_id, position=1, logprobs=[-0.25])
    ]
    assert not other.last_step.HasField("tops")
    assert not other.last_step.logprobs
    assert not other.last_step.prompt_scores


async def test_one_step_is_one_item_for_each_router_with_its_own_entries_only(
    model_dir: Path,
) -> None:
    async with group(model_dir, routers=2) as ([one, other], [ranks]):
        outputs = [one.submit([number + 5]) for number in range(3)]
        adds = await ranks.adds(3)
        outputs += [other.submit([number + 50]) for number in range(2)]
        adds += await ranks.adds(2)
        before = one.step_frames, other.step_frames
        ranks.step([Row(add.request_id, 0, [100 + at], STOP_TOKEN) for at, add in enumerate(adds)])
        assert [await each.result() for each in outputs] == [[100], [101], [102], [103], [104]]
        assert (one.step_frames - before[0], other.step_frames - before[1]) == (1, 1)
        assert one.strays == other.strays == 0


async def test_a_cancel_reaches_exactly_its_own_request(model_dir: Path) -> None:
    async with group(model_dir) as ([router], [ranks]):
        outputs = [router.submit([5 + number]) for number in range(12)]
        adds = await ranks.adds(12)
        router.link.cancel(outputs[1].entry_id)
        router.link.cancel(outputs[1].entry_id)
        assert await ranks.cancelled(1) == [adds[1].request_id]
        ranks.step([Row(add.request_id, 0, [9], LENGTH) for add in adds])
        others = [output for output in outputs if output is not outputs[1]]
        assert [await each.result() for each in others] == [[9]] * 11
        assert outputs[1].ids == []


async def test_cancels_after_the_end_disturb_nothing(model_dir: Path) -> None:
    async with group(model_dir) as ([router], [ranks]):
        done, goes_on = router.submit([5]), router.submit([6])
        first, second = await ranks.adds(2)
        ranks.step([Row(first.request_id, 0, [9], LENGTH)])
        await done.result()
        for _ in range(3):
            router.link.cancel(done.entry_id)
        ranks.step([Row(second.request_id, 0, [9], LENGTH)])
        assert await goes_on.result() == [9]
        marker = router.submit([7])
        [third] = await ranks.adds(1)
        router.link.cancel(marker.entry_id)
        # Cancels keep their order, so this is the first one that the ranks ever saw.
        assert await ranks.cancelled(1) == [third.request_id]


async def test_a_second_submit_with_the_same_number_leaves_the_first_alone(
    model_dir: Path,
) -> None:
    async with group(model_dir) as ([router], [ranks]):
        output = router.submit([5])
        [add] = await ranks.adds(1)
        sampling = SamplingParams(seed=1, max_tokens=4)
        twin = Submit(entry_id=output.entry_id, prompt_ids=pack_ids([6]), sampling=sampling)
        router.send(twin)
        other = router.submit([8])
        [second] = await ranks.adds(1)
        assert second.prompt == pack_ids([8])
        ranks.step([Row(each.request_id, 0, [9], LENGTH) for each in (add, second)])
        assert await output.result() == await other.result() == [9]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"fingerprint": "0" * 64}, errors.TokenizerMismatch),
        ({"dp_rank": 7}, errors.GroupNotFound),
        ({"prompt_ids": pack_ids([1] * 512)}, errors.PromptTooLong),
        ({"prompt_ids": pack_ids([1000])}, errors.UnknownToken),
        ({"prompt_ids": b"odd"}, errors.InvalidRequest),
        ({"sampling": SamplingParams(top_p=3.0)}, errors.BadSampling),
        ({"sampling": SamplingParams(temperature=float("nan"))}, errors.BadSampling),
        ({"adapter": "poet"}, errors.UnsupportedParameter),
    ],
)
async def test_a_bad_request_fails_alone_and_by_type(
    model_dir: Path, fields: dict[str, object], error: type[errors.MeshError]
) -> None:
    async with group(model_dir) as ([router], [ranks]):
        bad = router.submit([5], **fields)  # type: ignore[arg-type]
        good = router.submit([6])
        assert type(await bad.failure()) is error
        [add] = await ranks.adds(1)
        assert add.prompt == pack_ids([6])
        ranks.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await good.result() == [9]


@pytest.mark.parametrize("missing", ["seed", "max_tokens"])
async def test_seed_and_limit_must_be_decided_by_the_router(model_dir: Path, missing: str) -> None:
    async with group(model_dir) as ([router], _):
        output = router.submit([5])
        sampling = SamplingParams(seed=1, max_tokens=4)
        sampling.ClearField(missing)  # type: ignore[arg-type]
        fresh = output.__class__()
        fresh.entry_id = router.link.open(fresh)
        prompt = pack_ids([5])
        router.send(Submit(entry_id=fresh.entry_id, prompt_ids=prompt, sampling=sampling))
        failure = await fresh.failure()
        assert isinstance(failure, errors.BadSampling)
        assert failure.field == f"sampling.{missing}"


async def test_a_failure_in_the_ranks_is_passed_on_by_type(model_dir: Path) -> None:
    async with group(model_dir) as ([router], [ranks]):
        output = router.submit([5])
        [add] = await ranks.adds(1)
        ranks.step(failed=[Failed(add.request_id, "QUEUE_FULL", "64 requests wait")])
        failure = await output.failure()
        assert isinstance(failure, errors.QueueFull)
        assert failure.message == "64 requests wait"
        assert failure.retry_after_s == 1.0


async def test_a_deadline_ends_a_request_that_the_ranks_sit_on(model_dir: Path) -> None:
    async with group(model_dir) as ([router], [ranks]):
        output = router.submit([5], remaining_ms=50)
        [add] = await ranks.adds(1)
        assert add.timeout_ms == 50
        assert isinstance(await output.failure(), errors.DeadlineExceeded)
        assert await ranks.cancelled(1) == [add.request_id]


async def test_a_router_that_leaves_leaves_nothing_behind(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address:
        async with attach(address) as router:
            await router.until_up(0)
            ranks = await launcher.incarnation(0, 0)
            for number in range(20):
                router.submit([5 + number])
            adds = await ranks.adds(20)
        async with asyncio.timeout(1):
            gone = await ranks.cancelled(20)
        assert sorted(gone) == [add.request_id for add in adds]


async def test_requests_without_a_replica_spread_and_never_reach_one_that_is_down(
    model_dir: Path,
) -> None:
    async with group(model_dir, dp=3) as ([router], ranks):
        ranks[2].die()
        await router.until(lambda: router.state(2) == DOWN)
        for _ in range(20):
            router.submit([5])
        counts = [len(await ranks[each].adds(10)) for each in (0, 1)]
        assert counts == [10, 10]


async def test_a_named_replica_that_is_down_refuses_with_group_lost(model_dir: Path) -> None:
    async with group(model_dir, dp=2) as ([router], ranks):
        ranks[1].die()
        await router.until(lambda: router.state(1) == DOWN)
        output = router.submit([5], dp_rank=1)
        assert isinstance(await output.failure(), errors.GroupLost)


async def test_load_says_which_submits_it_knows_of(model_dir: Path) -> None:
    async with group(model_dir) as ([router], [ranks]):
        outputs = [router.submit([5]) for _ in range(3)]
        adds = await ranks.adds(3)
        ranks.last_request_id = adds[1].request_id
        ranks.step(accepted=[add.request_id for add in adds], load=ranks.load(running=2))
        await router.until(lambda: list(router.loads[0].running_counts) == [2])
        assert list(router.loads[0].seen_entry_ids) == [outputs[1].entry_id]


async def test_a_router_whose_requests_wait_gets_the_load_though_it_has_no_tokens(
    model_dir: Path,
) -> None:
    async with group(model_dir, routers=2) as ([one, other], [ranks]):
        one.submit([5])
        [mine] = await ranks.adds(1)
        other.submit([6])
        await ranks.adds(1)
        ranks.step([Row(mine.request_id, 0, [9])], load=ranks.load(running=1, waiting=1))
        async with asyncio.timeout(0.5):
            await other.until(lambda: list(other.loads[0].waiting_counts) == [1])


async def test_a_router_that_cancelled_its_only_request_hears_at_once_what_that_freed(
    model_dir: Path,
) -> None:
    async with group(model_dir) as ([router], [ranks]):
        output = router.submit([5])
        [add] = await ranks.adds(1)
        ranks.step(accepted=[add.request_id], load=ranks.load(running=1))
        await router.until(lambda: list(router.loads[0].running_counts) == [1])
        # A second's loads have just gone out, so the next ones are far.
        proofs = router.feeds[0].proofs
        await router.until(lambda: router.feeds[0].proofs > proofs)
        router.link.cancel(output.entry_id)
        await ranks.cancelled(1)
        ranks.step(load=ranks.load(running=0))
        async with asyncio.timeout(0.5):
            await router.until(lambda: list(router.loads[0].running_counts) == [0])


async def test_two_routers_follow_the_same_cache(model_dir: Path) -> None:
    async with group(model_dir, routers=2) as (routers, [ranks]):
        ranks.step(changes=[CacheChange(0, [10, 11, 12]), CacheChange(11, [20])])
        ranks.step(changes=[CacheChange(removed=[12]), CacheChange(0, [30])])
        for router in routers:
            feed = router.feeds[0]
            await router.until(lambda feed=feed: feed.proofs > 0 and len(feed.keys) == 4)  # type: ignore[misc]
            assert feed.keys == {10: 0, 11: 10, 20: 11, 30: 0}


async def test_a_router_that_asks_gets_a_new_snapshot_and_nothing_twice(model_dir: Path) -> None:
    async with group(model_dir) as ([router], [ranks]):
        ranks.step(changes=[CacheChange(0, list(range(100, 9_100)))])
        feed = router.feeds[0]
        await router.until(lambda: len(feed.keys) == 9_000)
        router.resnapshot(0)
        router.resnapshot(0)
        ranks.step(changes=[CacheChange(0, [50])])
        await router.until(lambda: feed.snapshots >= 2 and feed.whole and len(feed.keys) == 9_001)
        ranks.step(changes=[CacheChange(50, [51])])
        await router.until(lambda: feed.keys.get(51) == 50)


async def test_a_late_router_gets_what_is_there(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with (
        run_front(model_dir, launch=launcher) as address,
        attach(address, "early") as early,
    ):
        await early.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        ranks.step(changes=[CacheChange(0, list(range(1, 8_001)))])
        await early.until(lambda: len(early.feeds[0].keys) == 8_000)
        async with attach(address, "late") as late:
            await late.until(lambda: len(late.feeds[0].keys) == 8_000)
            assert late.feeds[0].keys == early.feeds[0].keys
            assert late.feeds[0].sequence == early.feeds[0].sequence


async def test_a_cache_that_contradicts_its_feed_is_emptied_so_that_all_copies_agree(
    model_dir: Path,
) -> None:
    async with group(model_dir) as ([router], [ranks]):
        ranks.step(changes=[CacheChange(0, [10, 11])])
        ranks.step(digest=CacheDigest(5, 77))
        flush = await ranks.flush()
        ranks.step(changes=[CacheChange(cleared=True)], answers=[Answer(flush.token, 5)])
        ranks.step(changes=[CacheChange(0, [40])])
        feed = router.feeds[0]
        await router.until(lambda: feed.keys == {40: 0} and feed.proofs > 0)
        assert router.state(0) == UP


async def test_a_cache_whose_feed_breaks_again_is_started_anew(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        ranks.step(changes=[CacheChange(99, [10])])
        flush = await ranks.flush()
        ranks.step(changes=[CacheChange(cleared=True)], answers=[Answer(flush.token, 0)])
        ranks.step(digest=CacheDigest(5, 77))
        await ranks.ended.wait()
        fresh = await launcher.incarnation(0, 1)
        await router.until(lambda: router.state(0) == UP)
        assert router.statuses[0].incarnation == fresh.incarnation


async def test_idle_costs_a_router_at_most_two_frames_a_second(model_dir: Path) -> None:
    async with group(model_dir) as ([router], _):
        await router.until(lambda: router.feeds[0].proofs == 1)
        before, began = router.frames, asyncio.get_running_loop().time()
        await router.until(lambda: router.feeds[0].proofs == 3)
        seconds = asyncio.get_running_loop().time() - began
        assert seconds > 1.5
        assert router.frames - before <= 2 * 2
