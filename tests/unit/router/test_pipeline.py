"""The way of a request, with services in memory that die on command."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields, replace

import pytest

from radixmesh.blocks import pack_ids, unpack_ids
from radixmesh.errors import (
    BadSampling,
    DeadlineExceeded,
    Draining,
    GroupLost,
    InvalidRequest,
    LinkLost,
    MeshError,
    ModelNotServed,
    NoReplicaReady,
    PromptTooLong,
    QueueFull,
    RankDesync,
    RequestPoisoned,
    ServiceUnavailable,
    SlowConsumer,
    TemplateFailed,
    UnknownToken,
)
from router.edge.admission import Admission
from router.fleet.ask import SubmitSpec
from router.fleet.breaker import Outcome
from router.pipeline import Pace, Pipeline
from router.ports import Texts
from router.request import (
    ChatMessage,
    ChatPrompt,
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerateRequest,
    IdsPrompt,
    Sampling,
    TextPrompt,
)
from router.text.detokenizers import DecodeOptions
from tests.fakes.small_mesh import (
    SmallDecoder,
    SmallEncoder,
    SmallFleet,
    expected_text,
)

PROMPT = "the quick brown fox"
QUICK = Pace(
    request_timeout_s=10.0,
    ready_wait_s=0.05,
    text_wait_s=0.05,
    resume_wait_s=5.0,
    stream_interval_s=0.0,
)


@dataclass
class Mesh:
    fleet: SmallFleet = field(default_factory=SmallFleet)
    decoder: SmallDecoder = field(default_factory=SmallDecoder)
    encoder: SmallEncoder = field(default_factory=SmallEncoder)
    admission: Admission = field(
        default_factory=lambda: Admission(max_concurrent=0, max_queued=0, queue_timeout_s=1)
    )
    losses: list[tuple[str, str]] = field(default_factory=list)
    steps: int = 0
    # Called before every step, with its number.
    script: Callable[[int], None] = lambda step: None

    def pipeline(self, pace: Pace = QUICK) -> Pipeline:
        return Pipeline(
            self.fleet,
            texts=Texts(self.encoder, self.decoder),
            admit=self.admission.admit,
            pace=pace,
            rng=random.Random(1),
            on_loss=lambda service, reason: self.losses.append((service, reason)),
        )

    def step(self) -> None:
        self.script(self.steps)
        self.steps += 1
        self.fleet.step()
        self.decoder.step()

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await task

    def assert_nothing_is_held(self) -> None:
        assert not self.fleet.entries
        assert not self.fleet.booked
        assert not self.decoder.entries
        assert self.admission.running == 0
        assert self.admission.queued == 0


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def ask(count: int = 12, **changes: object) -> GenerateRequest:
    sampling = changes.pop("sampling", Sampling(max_tokens=count, seed=7))
    return GenerateRequest(prompt=TextPrompt(PROMPT), sampling=sampling, **changes)  # type: ignore[arg-type]


@dataclass
class Got:
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[tuple[int, bytes, float]] = field(default_factory=list)
    finishes: dict[int, Finish] = field(default_factory=dict)
    events: int = 0

    def add(self, event: Event) -> None:
        self.events += 1
        if isinstance(event, Finish):
            assert event.choice not in self.finishes
            self.finishes[event.choice] = event
            return
        assert event.choice not in self.finishes, "nothing follows a finish"
        self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
        self.ids.setdefault(event.choice, []).extend(unpack_ids(event.ids))
        self.logprobs += [(one.token_id, one.raw, one.logprob) for one in event.logprobs]


async def collect(mesh: Mesh, request: GenerateRequest, pace: Pace = QUICK) -> Got:
    got = Got()
    async with mesh.running(), aclosing(mesh.pipeline(pace).generate(request)) as events:
        async for event in events:
            got.add(event)
    return got


async def failure(mesh: Mesh, request: GenerateRequest, pace: Pace = QUICK) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await collect(mesh, request, pace)
    return caught.value


# The plain way


async def test_text_comes_back_with_usage_and_a_receipt(mesh: Mesh) -> None:
    for replica in mesh.fleet.replicas:
        replica.cached_tokens = 10
    got = await collect(mesh, ask())
    assert got.texts == {0: expected_text(PROMPT, 12)}
    assert got.ids[0] == list(got.texts[0].encode())
    finish = got.finishes[0]
    assert finish.reason is FinishReason.LENGTH
    usage = finish.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (19, 10, 12)
    receipt = finish.receipt
    assert receipt.group_id in {"g0", "g1"}
    assert (receipt.prompt_blocks, receipt.predicted_blocks, receipt.actual_blocks) == (4, 2, 2)
    assert (receipt.predicted_wait_s, receipt.actual_wait_s) == (0.25, 0.125)
    assert (receipt.attempts, receipt.seed, receipt.policy) == (1, 7, "price")
    mesh.assert_nothing_is_held()


async def test_a_stop_id_ends_the_output_and_counts(mesh: Mesh) -> None:
    mesh.fleet.eos_after = 5
    got = await collect(mesh, ask())
    assert got.texts == {0: expected_text(PROMPT, 5)}
    assert got.finishes[0].reason is FinishReason.STOP_TOKEN
    assert got.finishes[0].usage.completion_tokens == 6
    assert len(got.ids[0]) == 6


async def test_a_stop_string_ends_the_output_and_stops_the_worker(mesh: Mesh) -> None:
    whole = expected_text(PROMPT, 40)
    stop = whole[20:23]
    end = whole.index(stop)
    got = await collect(mesh, ask(40, stop=(stop,)))
    assert got.texts == {0: whole[:end]}
    finish = got.finishes[0]
    assert (finish.reason, finish.stop_matched) == (FinishReason.STOP_STRING, stop)
    assert finish.usage.completion_tokens == end + 3
    assert mesh.fleet.cancelled == 1
    mesh.assert_nothing_is_held()


async def test_choices_share_a_replica_and_each_ends_once(mesh: Mesh) -> None:
    got = await collect(mesh, ask(6, choices=3))
    assert set(got.texts) == set(got.finishes) == {0, 1, 2}
    assert [spec.choice for spec in mesh.fleet.specs] == [0, 1, 2]
    assert len({finish.receipt.group_id for finish in got.finishes.values()}) == 1
    mesh.assert_nothing_is_held()


async def test_log_probabilities_line_up_with_ids(mesh: Mesh) -> None:
    request = ask(sampling=Sampling(max_tokens=8, seed=1, logprobs=True))
    mesh.script = lambda step: mesh.decoder.kill() if step == 6 else None
    got = await collect(mesh, request)
    assert [token for token, _, _ in got.logprobs] == got.ids[0]
    assert all(raw == bytes([token]) and lp == -token for token, raw, lp in got.logprobs)
    assert len(got.ids[0]) == 8


async def test_the_router_draws_a_seed_and_every_attempt_has_the_same(mesh: Mesh) -> None:
    mesh.script = kill_serving_replica(mesh, {5})
    got = await collect(mesh, ask(sampling=Sampling(max_tokens=8)))
    seeds = {spec.sampling.seed for spec in mesh.fleet.specs}
    assert seeds == {got.finishes[0].receipt.seed}
    assert len(mesh.fleet.specs) == 2


async def test_a_default_limit_is_capped_by_the_context_length(mesh: Mesh) -> None:
    mesh.fleet.eos_after = 0
    await collect(mesh, GenerateRequest(prompt=TextPrompt("x" * 500)))
    assert mesh.fleet.specs[0].sampling.max_tokens == 12


# Refusals before any work


@pytest.mark.parametrize(
    ("request_", "error", "name"),
    [
        (ask(sampling=Sampling(temperature=-1)), BadSampling, "sampling.temperature"),
        (ask(sampling=Sampling(temperature=float("nan"))), BadSampling, "sampling.temperature"),
        (ask(sampling=Sampling(top_p=0)), BadSampling, "sampling.top_p"),
        (ask(sampling=Sampling(top_k=-1)), BadSampling, "sampling.top_k"),
        (ask(sampling=Sampling(min_p=1.5)), BadSampling, "sampling.min_p"),
        (ask(sampling=Sampling(max_tokens=0)), BadSampling, "sampling.max_tokens"),
        (ask(sampling=Sampling(max_tokens=2, min_tokens=3)), BadSampling, "sampling.min_tokens"),
        *(
            (ask(sampling=sampling), BadSampling, f"sampling.{name}")
            for name, sampling in [
                ("repetition_penalty", Sampling(repetition_penalty=0)),
                ("repetition_penalty", Sampling(repetition_penalty=101)),
                ("presence_penalty", Sampling(presence_penalty=float("nan"))),
                ("frequency_penalty", Sampling(frequency_penalty=-2.5)),
                ("logit_bias", Sampling(logit_bias=((5, 101.0),))),
                ("logit_bias", Sampling(logit_bias=((5, float("nan")),))),
                ("logit_bias", Sampling(logit_bias=tuple((one, 1.0) for one in range(1025)))),
            ]
        ),
        (ask(choices=17), InvalidRequest, "choice_count"),
        (ask(stop=("",)), InvalidRequest, "stop"),
        (ask(priority=101), InvalidRequest, "priority"),
        (GenerateRequest(prompt=TextPrompt("")), InvalidRequest, "text"),
        (GenerateRequest(prompt=TextPrompt("half \ud800")), InvalidRequest, "text"),
        (ask(stop=("\udfff",)), InvalidRequest, "stop"),
        (
            GenerateRequest(prompt=ChatPrompt((ChatMessage("user", "x"),) * 10_001)),
            InvalidRequest,
            "chat.messages",
        ),
        (ask(cache_salt="\ud800"), InvalidRequest, "cache_salt"),
        (ask(tenant="x" * 257), InvalidRequest, "tenant"),
        (GenerateRequest(prompt=IdsPrompt(b"")), InvalidRequest, "token_ids"),
        (GenerateRequest(prompt=IdsPrompt(pack_ids([5, 128]))), UnknownToken, "token_ids"),
        (GenerateRequest(prompt=TextPrompt("x" * 512)), PromptTooLong, "prompt"),
        (ask(494), PromptTooLong, "prompt"),
        (ask(model="other"), ModelNotServed, ""),
    ],
)
async def test_a_bad_request_is_refused_before_any_work(
    mesh: Mesh, request_: GenerateRequest, error: type[MeshError], name: str
) -> None:
    refusal = await failure(mesh, request_)
    assert type(refusal) is error
    assert refusal.field == name
    assert not mesh.fleet.specs
    mesh.assert_nothing_is_held()


async def test_an_error_of_the_prompt_is_the_clients(mesh: Mesh) -> None:
    mesh.encoder.error = TemplateFailed("roles must alternate")
    assert isinstance(await failure(mesh, ask()), TemplateFailed)


async def test_no_served_model_is_a_matter_of_time(mesh: Mesh) -> None:
    mesh.fleet.served = []
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, NoReplicaReady)
    assert refusal.retry_after_s


# Death of services


def kill_serving_replica(
    mesh: Mesh, steps: set[int], error: type[MeshError] = GroupLost
) -> Callable[[int], None]:
    def script(step: int) -> None:
        if step not in steps:
            return
        for replica in mesh.fleet.replicas:
            if replica.entries:
                mesh.fleet.kill(replica, error)
                mesh.fleet.revive(replica)

    return script


@pytest.mark.parametrize("error", [GroupLost, LinkLost, Draining, RankDesync])
async def test_a_stream_whose_replica_is_lost_goes_on_at_the_next_position(
    mesh: Mesh, error: type[MeshError]
) -> None:
    mesh.script = kill_serving_replica(mesh, {8}, error)
    got = await collect(mesh, ask(40))
    assert got.texts == {0: expected_text(PROMPT, 40)}
    first, second = mesh.fleet.specs
    assert first.output_ids == b""
    assert 0 < len(second.output_ids) // 4 < 40
    assert second.prompt_ids == first.prompt_ids
    assert mesh.fleet.asks[1].resume
    assert got.finishes[0].receipt.attempts == 2
    assert mesh.losses == [("worker", error.reason)]
    mesh.assert_nothing_is_held()


async def test_a_receipt_says_where_an_output_began_and_where_it_ended(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            mesh.fleet.kill(mesh.fleet.entries[0].replica)

    mesh.script = script
    receipt = (await collect(mesh, ask(40))).finishes[0].receipt
    assert (receipt.group_id, receipt.last_group_id) == ("g0", "g1")


async def test_a_dead_replica_is_avoided_and_a_cut_link_is_not(mesh: Mesh) -> None:
    mesh.script = kill_serving_replica(mesh, {5})
    await collect(mesh, ask(20))
    assert mesh.fleet.asks[1].avoid
    mesh.script = kill_serving_replica(mesh, {mesh.steps + 5}, LinkLost)
    await collect(mesh, ask(20))
    assert not mesh.fleet.asks[3].avoid


async def test_a_stream_waits_for_a_replica_to_come_back(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica)
        if step == 60:
            assert mesh.fleet.waiting == 1
            mesh.fleet.revive(mesh.fleet.replicas[0])

    mesh.script = script
    got = await collect(mesh, ask(40))
    assert got.texts == {0: expected_text(PROMPT, 40)}


async def test_a_stream_that_nobody_takes_over_in_time_ends_unavailable(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica)

    mesh.script = script
    pace = Pace(resume_wait_s=0.05, stream_interval_s=0)
    refusal = await failure(mesh, ask(40), pace)
    assert isinstance(refusal, NoReplicaReady)
    mesh.assert_nothing_is_held()


async def test_a_router_that_ends_tells_its_clients_and_holds_nothing(mesh: Mesh) -> None:
    pipeline = mesh.pipeline()
    async with mesh.running(), aclosing(pipeline.generate(ask(40))) as events:
        await anext(events)
        pipeline.end(Draining("the router stops"))
        with pytest.raises(Draining):
            async for _ in events:
                pass
    mesh.assert_nothing_is_held()


async def test_new_work_waits_a_moment_for_a_replica_then_is_refused(mesh: Mesh) -> None:
    for replica in mesh.fleet.replicas:
        mesh.fleet.kill(replica)
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, NoReplicaReady)
    assert refusal.retry_after_s


async def test_a_request_that_takes_down_two_replicas_is_poison(mesh: Mesh) -> None:
    def script(step: int) -> None:
        for replica in mesh.fleet.replicas:
            if any(entry.started for entry in replica.entries):
                mesh.fleet.kill(replica)
                mesh.fleet.revive(replica)

    mesh.script = script
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, RequestPoisoned)
    assert len(mesh.fleet.specs) == 2
    mesh.assert_nothing_is_held()


async def test_cut_links_are_no_poison(mesh: Mesh) -> None:
    mesh.script = kill_serving_replica(mesh, {10, 20, 30, 40}, LinkLost)
    got = await collect(mesh, ask(60))
    assert got.texts == {0: expected_text(PROMPT, 60)}
    assert got.finishes[0].receipt.attempts == 5


@pytest.mark.parametrize(("error", "attempts"), [(LinkLost, 2), (Draining, 1)])
async def test_a_place_counts_where_an_output_may_have_run_though_nobody_heard_so(
    mesh: Mesh, error: type[MeshError], attempts: int
) -> None:
    """The first attempt is sent and lost before anything came back."""

    def script(step: int) -> None:
        del step
        if len(mesh.fleet.specs) == 1:
            for entry in mesh.fleet.entries:
                entry.fail(error("lost"))

    mesh.script = script
    got = await collect(mesh, ask(12))
    assert len(mesh.fleet.specs) == 2
    assert got.finishes[0].receipt.attempts == attempts


async def test_a_full_replica_sends_work_to_another(mesh: Mesh) -> None:
    mesh.fleet.replicas[0].full = True
    got = await collect(mesh, ask())
    assert got.texts == {0: expected_text(PROMPT, 12)}
    assert [spec.output_ids for spec in mesh.fleet.specs] == [b"", b""]
    assert got.finishes[0].receipt.attempts == 1
    assert got.finishes[0].receipt.group_id == "g1"


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_full_fleet_is_the_clients_to_back_off_from(size: int) -> None:
    mesh = Mesh(fleet=SmallFleet(size))
    for replica in mesh.fleet.replicas:
        replica.full = True
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_s
    assert len(mesh.fleet.specs) == min(size, 2)
    mesh.assert_nothing_is_held()


async def test_a_stream_does_not_end_because_the_fleet_is_full_for_a_while(mesh: Mesh) -> None:
    lost = asyncio.get_running_loop().create_future()

    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                replica.full = True
            kill_serving_replica(mesh, {8})(8)
        if len(mesh.fleet.specs) >= 4:
            for replica in mesh.fleet.replicas:
                replica.full = False
            lost.cancel()

    mesh.script = script
    got = await collect(mesh, ask(40))
    assert lost.cancelled()
    assert got.texts == {0: expected_text(PROMPT, 40)}


async def test_a_lost_detokenizer_gets_a_successor_that_replays(mesh: Mesh) -> None:
    mesh.script = lambda step: mesh.decoder.kill() if step in {3, 9, 10, 25} else None
    got = await collect(mesh, ask(40))
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert got.ids[0] == list(got.texts[0].encode())
    assert mesh.decoder.opened == 5
    assert mesh.losses.count(("detokenizer", "LINK_LOST")) == 4
    mesh.assert_nothing_is_held()


async def test_a_detokenizer_lost_after_the_last_id_still_ends_the_stream(mesh: Mesh) -> None:
    def script(step: int) -> None:
        mesh.decoder.paused = mesh.decoder.opened == 1
        if not mesh.fleet.entries and mesh.fleet.specs and mesh.decoder.paused:
            mesh.decoder.kill()

    mesh.script = script
    got = await collect(mesh, ask(6))
    assert got.texts == {0: expected_text(PROMPT, 6)}
    assert mesh.decoder.opened == 2


async def test_detokenizers_that_die_of_an_output_end_it(mesh: Mesh) -> None:
    mesh.script = lambda step: mesh.decoder.kill()
    refusal = await failure(mesh, ask(1000 // 4))
    assert isinstance(refusal, LinkLost)
    assert mesh.decoder.opened == 4
    mesh.assert_nothing_is_held()


async def test_no_detokenizer_is_a_typed_refusal(mesh: Mesh) -> None:
    mesh.decoder.up = False
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, ServiceUnavailable)
    mesh.assert_nothing_is_held()


async def test_a_stop_string_is_found_across_a_resume(mesh: Mesh) -> None:
    whole = expected_text(PROMPT, 40)
    stop = whole[9:14]

    def script(step: int) -> None:
        text = sum(len(entry.ids) for entry in mesh.decoder.entries)
        # The first half of the stop string has been generated.
        if text == 11 and len(mesh.fleet.specs) == 1:
            kill_serving_replica(mesh, {0})(0)
            mesh.decoder.kill()

    mesh.script = script
    got = await collect(mesh, ask(40, stop=(stop,)))
    assert got.texts == {0: whole[:9]}
    assert got.finishes[0].stop_matched == stop
    assert len(mesh.fleet.specs) == 2
    mesh.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(25))
async def test_random_deaths_change_nothing_for_the_client(seed: int) -> None:
    mesh = Mesh()
    chance = random.Random(seed)
    mesh.fleet.eos_after = chance.choice([-1, 10, 33])

    def script(step: int) -> None:
        # Rare enough that every attempt makes some progress.
        if step % 9 == 8 and chance.random() < 0.7:
            kill_serving_replica(mesh, {step}, LinkLost)(step)
        if step % 5 == 3 and chance.random() < 0.7:
            mesh.decoder.kill()

    mesh.script = script
    got = await collect(mesh, ask(60, choices=2))
    count = 60 if mesh.fleet.eos_after < 0 else mesh.fleet.eos_after
    for choice in (0, 1):
        assert got.texts[choice] == expected_text(PROMPT, count)
    mesh.assert_nothing_is_held()


# What a resume goes on from: ids, and what was asked for. An attempt must depend on nothing else,
# or a resume has to be refused. Whoever adds a parameter says here that this is so for it.

PARAMETERS: dict[str, object] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 11,
    "max_tokens": 40,
    "min_tokens": 30,
    "stop_token_ids": (1,),
    "ignore_eos": True,
    "logprobs": True,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": ((5, -1.0),),
}


def test_every_way_to_draw_is_known_to_follow_from_ids_and_position() -> None:
    assert {each.name for each in fields(Sampling)} == set(PARAMETERS)
    for name, value in PARAMETERS.items():
        assert value != getattr(Sampling(), name)


def test_every_part_of_a_submit_is_known_to_be_the_same_for_each_attempt() -> None:
    same = {"prompt_ids", "sampling", "choice", "adapter", "cache_salt", "priority", "fingerprint"}
    assert {each.name for each in fields(SubmitSpec)} == {*same, "output_ids", "timeout_s"}


async def test_a_resumed_output_is_drawn_and_read_as_was_asked_for(mesh: Mesh) -> None:
    request = ask(
        sampling=Sampling(**PARAMETERS),  # type: ignore[arg-type]
        stop=("#", "?"),
        include_stop=True,
        cache_salt="salt",
        priority=3,
        keep_special_tokens=True,
        choices=2,
    )
    kill = kill_serving_replica(mesh, {12, 22}, LinkLost)

    def script(step: int) -> None:
        kill(step)
        if step in {16, 24}:
            mesh.decoder.kill()

    mesh.script = script
    await collect(mesh, request)
    for choice in (0, 1):
        first, *later = [spec for spec in mesh.fleet.specs if spec.choice == choice]
        assert later
        for number, spec in enumerate(later):
            assert replace(spec, output_ids=b"", timeout_s=None) == replace(first, timeout_s=None)
            assert len(spec.output_ids) > 4 * number
            assert spec.timeout_s is not None
            assert first.timeout_s is not None
            assert spec.timeout_s <= first.timeout_s
    for name, value in PARAMETERS.items():
        assert getattr(mesh.fleet.specs[-1].sampling, name) == value
    opened = mesh.decoder.options
    assert len(opened) > 2
    assert set(opened) == {
        DecodeOptions(
            stop_strings=request.stop,
            include_stop=True,
            min_tokens=30,
            keep_special_tokens=True,
            render_tokens=True,
        )
    }


# Time


async def test_the_deadline_ends_a_request_that_generates(mesh: Mesh) -> None:
    mesh.fleet.step = lambda: None  # type: ignore[method-assign]
    refusal = await failure(mesh, ask(timeout_s=0.05))
    assert isinstance(refusal, DeadlineExceeded)
    mesh.assert_nothing_is_held()


async def test_the_deadline_ends_a_request_that_is_tokenized(mesh: Mesh) -> None:
    mesh.encoder.held = asyncio.Event()
    assert isinstance(await failure(mesh, ask(timeout_s=0.05)), DeadlineExceeded)
    assert mesh.encoder.timeouts[0] <= 0.05


async def test_the_deadline_ends_a_stream_that_waits_for_a_place(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica)

    mesh.script = script
    refusal = await failure(mesh, ask(40, timeout_s=0.1))
    assert isinstance(refusal, DeadlineExceeded)
    mesh.assert_nothing_is_held()


async def test_a_clients_deadline_does_not_exceed_the_servers(mesh: Mesh) -> None:
    mesh.encoder.held = asyncio.Event()
    pace = Pace(request_timeout_s=0.05)
    assert isinstance(await failure(mesh, ask(timeout_s=1e9), pace), DeadlineExceeded)


# Silence


IMPATIENT = Pace(
    request_timeout_s=10.0,
    ready_wait_s=1.0,
    text_wait_s=0.05,
    resume_wait_s=1.0,
    stream_interval_s=0.0,
    attempt_timeout_s=0.1,
    text_timeout_s=0.1,
)


def stall(mesh: Mesh, *, after: int) -> Callable[[int], None]:
    """The replica that has the stream stops at a step, and stays so."""

    def script(step: int) -> None:
        if step == after:
            for replica in mesh.fleet.replicas:
                replica.stalled = bool(replica.entries)

    mesh.fleet.predicted_wait_s = 0.01
    return script


@pytest.mark.parametrize(
    ("after", "resumes", "attempts"),
    [pytest.param(2, False, 1, id="never accepts"), pytest.param(9, True, 2, id="starts")],
)
async def test_a_replica_that_stalls_is_left(
    mesh: Mesh, after: int, resumes: bool, attempts: int
) -> None:
    mesh.script = stall(mesh, after=after)
    if not resumes:
        for replica in mesh.fleet.replicas[:1]:
            replica.stalled = True
        mesh.script = lambda step: None
    got = await collect(mesh, ask(40), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert [one.resume for one in mesh.fleet.asks] == [False, resumes]
    stalled, healthy = mesh.fleet.replicas
    assert mesh.fleet.asks[1].avoid == {(stalled.group_id, 0, 1)}
    assert mesh.losses == [("worker", "ATTEMPT_TIMEOUT")]
    assert mesh.fleet.outcomes[0] == (stalled.group_id, Outcome.FAILED)
    assert mesh.fleet.cancelled == 1, "the first attempt is fenced"
    receipt = got.finishes[0].receipt
    assert (receipt.attempts, receipt.last_group_id) == (attempts, healthy.group_id)
    mesh.assert_nothing_is_held()


async def test_what_a_fenced_replica_still_says_is_not_heard(mesh: Mesh) -> None:
    stalls = stall(mesh, after=9)

    def script(step: int) -> None:
        stalls(step)
        if step == 9:
            for replica in mesh.fleet.replicas:
                replica.up = False  # so that there is nobody to go to for a while
        if mesh.losses and len(mesh.fleet.sinks) == 1:
            mesh.fleet.revive(mesh.fleet.replicas[1])
        if mesh.losses:
            # It wakes up with ids at every position that may be the next one, and dies again.
            for position in range(40):
                mesh.fleet.sinks[0].on_tokens(position, pack_ids([120]), [], 0)
            mesh.fleet.sinks[0].on_failed(GroupLost("late"))

    mesh.script = script
    got = await collect(mesh, ask(40), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert len(mesh.fleet.specs) == 2


async def test_a_long_queue_or_prefill_is_no_silence_while_the_replica_works(mesh: Mesh) -> None:
    mesh.fleet.predicted_wait_s = 0.01
    began = asyncio.get_running_loop().time()

    def script(step: int) -> None:
        # It makes steps for others for four times as long as silence is borne.
        waits = asyncio.get_running_loop().time() - began < 0.4
        for replica in mesh.fleet.replicas:
            replica.stalled = waits
            replica.stepped_at = asyncio.get_running_loop().time()

    mesh.script = script
    got = await collect(mesh, ask(), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 12)}
    assert not mesh.losses
    assert len(mesh.fleet.specs) == 1


async def test_a_prefill_that_was_predicted_to_take_long_may(mesh: Mesh) -> None:
    mesh.fleet.predicted_wait_s = 0.15
    began = asyncio.get_running_loop().time()

    def script(step: int) -> None:
        waits = asyncio.get_running_loop().time() - began < 0.3
        for replica in mesh.fleet.replicas:
            replica.stalled = waits

    mesh.script = script
    await collect(mesh, ask(), IMPATIENT)
    assert not mesh.losses


async def test_silence_is_borne_for_ever_where_that_is_asked_for(mesh: Mesh) -> None:
    for replica in mesh.fleet.replicas:
        replica.stalled = True
    pace = replace(IMPATIENT, attempt_timeout_s=0)
    assert isinstance(await failure(mesh, ask(timeout_s=0.4), pace), DeadlineExceeded)
    assert len(mesh.fleet.specs) == 1
    mesh.assert_nothing_is_held()


async def test_a_fleet_that_stalls_altogether_ends_in_a_typed_error_in_time(mesh: Mesh) -> None:
    mesh.fleet.predicted_wait_s = 0.01
    for replica in mesh.fleet.replicas:
        replica.stalled = True
    refusal = await failure(mesh, ask(), IMPATIENT)
    assert isinstance(refusal, GroupLost)
    assert refusal.retry_after_s
    assert len(mesh.fleet.specs) == 6
    mesh.assert_nothing_is_held()


async def test_the_only_replica_is_tried_again_after_a_silence(mesh: Mesh) -> None:
    del mesh.fleet.replicas[1]
    mesh.fleet.predicted_wait_s = 0.01

    def script(step: int) -> None:
        mesh.fleet.replicas[0].stalled = step >= 9 and len(mesh.fleet.specs) < 3

    mesh.script = script
    got = await collect(mesh, ask(40), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert len(mesh.fleet.specs) == 3


@pytest.mark.parametrize("after", [0, 12, 46])
async def test_a_detokenizer_that_stalls_is_left(mesh: Mesh, after: int) -> None:
    # Before the first text, after some, and after the last id.
    def script(step: int) -> None:
        mesh.decoder.paused = step >= after and not mesh.decoder.blamed

    mesh.script = script
    got = await collect(mesh, ask(200), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 200)}
    assert got.ids[0] == list(got.texts[0].encode())
    assert (mesh.decoder.opened, mesh.decoder.blamed) == (2, 1)
    assert mesh.losses == [("detokenizer", "SERVICE_UNAVAILABLE")]
    mesh.assert_nothing_is_held()


async def test_a_detokenizer_that_stalls_is_left_while_the_output_goes_on(mesh: Mesh) -> None:
    def script(step: int) -> None:
        mesh.decoder.paused = step >= 12 and not mesh.decoder.blamed
        for replica in mesh.fleet.replicas:
            # The last id comes long after: it is not what calls attention to the silence.
            replica.stalled = step >= 120 and not mesh.decoder.blamed

    mesh.script = script
    pace = replace(IMPATIENT, attempt_timeout_s=0)
    got = await collect(mesh, ask(200, timeout_s=2.0), pace)
    assert got.texts == {0: expected_text(PROMPT, 200)}
    assert mesh.losses == [("detokenizer", "SERVICE_UNAVAILABLE")]


async def test_detokenizers_that_all_stall_end_it_in_a_typed_error(mesh: Mesh) -> None:
    mesh.decoder.paused = True
    assert isinstance(await failure(mesh, ask(200), IMPATIENT), ServiceUnavailable)
    assert mesh.decoder.opened == 4
    mesh.assert_nothing_is_held()


async def test_a_detokenizer_that_owes_nothing_may_be_silent(mesh: Mesh) -> None:
    # The worker rests in mid-stream, longer than a detokenizer may be silent.
    rested = 0.0

    def script(step: int) -> None:
        nonlocal rested
        now = asyncio.get_running_loop().time()
        rested = rested or (now if step == 20 else 0.0)
        for replica in mesh.fleet.replicas:
            replica.stalled = 0 < now - rested < 0.3 and bool(rested)

    mesh.script = script
    await collect(mesh, ask(40), replace(IMPATIENT, attempt_timeout_s=0))
    assert not mesh.losses


async def test_text_that_a_stop_string_holds_back_is_no_silence(mesh: Mesh) -> None:
    whole = expected_text(PROMPT, 300)
    stop = whole[10:260] + "#"
    rested: list[float] = []

    def script(step: int) -> None:
        # In the middle of 250 characters that are held back the worker rests.
        now = asyncio.get_running_loop().time()
        if step == 150:
            rested.append(now)
        for replica in mesh.fleet.replicas:
            replica.stalled = bool(rested) and now - rested[0] < 0.3

    mesh.script = script
    got = await collect(mesh, ask(300, stop=(stop,)), replace(IMPATIENT, attempt_timeout_s=0))
    assert got.texts == {0: whole}
    assert not mesh.losses


@pytest.mark.parametrize("seed", range(8))
async def test_random_stalls_and_deaths_change_nothing_for_the_client(seed: int) -> None:
    mesh = Mesh(fleet=SmallFleet(3))
    mesh.fleet.predicted_wait_s = 0.01
    chance = random.Random(seed)
    pace = replace(IMPATIENT, attempt_timeout_s=0.05, text_timeout_s=0.05)
    due = {chance.randrange(60): chance.randrange(3) for _ in range(4)}
    ids, blamed = -1, 0

    def script(step: int) -> None:
        nonlocal ids, blamed
        if mesh.decoder.blamed > blamed:
            blamed, mesh.decoder.paused = mesh.decoder.blamed, False
        had = max((len(entry.ids) for entry in mesh.decoder.entries), default=0)
        if had <= ids:
            return
        # One fault at a time, at ids that are drawn; what stalled before works again.
        ids = had
        fault = due.get(ids)
        if fault is None:
            return
        for replica in mesh.fleet.replicas:
            replica.stalled = fault == 0 and bool(replica.entries)
        mesh.decoder.paused = fault == 1
        if fault == 2:
            kill_serving_replica(mesh, {step}, LinkLost)(step)

    mesh.script = script
    got = await collect(mesh, ask(150, choices=2), pace)
    for choice in (0, 1):
        assert got.texts[choice] == expected_text(PROMPT, 150)
    assert mesh.losses
    mesh.assert_nothing_is_held()


async def test_a_stop_string_is_a_good_end_for_the_replica(mesh: Mesh) -> None:
    stop = expected_text(PROMPT, 40)[20:23]
    await collect(mesh, ask(40, stop=(stop,)))
    assert mesh.fleet.outcomes[0][1] is Outcome.FINISHED


# The client


async def test_a_client_that_reads_nothing_has_text_merged(mesh: Mesh) -> None:
    async with aclosing(mesh.pipeline().generate(ask(50))) as events:
        first = asyncio.ensure_future(anext(events))
        while not first.done():
            mesh.step()
            await asyncio.sleep(0)
        for _ in range(200):
            mesh.step()
            await asyncio.sleep(0)
        head = await first
        rest = [event async for event in events]
    assert len(rest) == 2
    assert isinstance(head, Delta)
    assert isinstance(rest[0], Delta)
    assert head.text + rest[0].text == expected_text(PROMPT, 50)


async def test_a_client_that_falls_too_far_behind_is_ended(mesh: Mesh) -> None:
    pace = Pace(stream_interval_s=0, max_pending_bytes=100)
    async with aclosing(mesh.pipeline(pace).generate(ask(400))) as events:
        waiting = asyncio.ensure_future(anext(events))
        while not waiting.done():
            mesh.step()
            await asyncio.sleep(0)
        for _ in range(300):
            mesh.step()
            await asyncio.sleep(0)
        assert not mesh.fleet.entries, "the worker stopped at once"
        with pytest.raises(SlowConsumer):
            await anext(events)
    mesh.assert_nothing_is_held()


async def test_the_first_text_goes_at_once_and_later_text_is_merged(mesh: Mesh) -> None:
    pace = Pace(stream_interval_s=60.0)
    got = await collect(mesh, ask(40), pace)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert got.events == 3, "the first text, all the rest, the finish"


async def test_a_permit_is_held_while_the_stream_is_open(mesh: Mesh) -> None:
    mesh.admission = Admission(max_concurrent=1, max_queued=0, queue_timeout_s=1)
    pipeline = mesh.pipeline()
    async with mesh.running():
        async with aclosing(pipeline.generate(ask(400))) as events:
            await anext(events)
            with pytest.raises(QueueFull):
                await anext(pipeline.generate(ask()))
        await anext(pipeline.generate(ask()))


async def run_until(mesh: Mesh, task: asyncio.Task[None], *, turns: int) -> bool:
    """Step for some turns of the loop; return whether the task ended by then."""
    for _ in range(turns):
        if task.done():
            return True
        mesh.step()
        await asyncio.sleep(0)
    return task.done()


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_cancel_at_any_moment_frees_everything(choices: int) -> None:
    # Every turn of the loop is a moment; deaths on the way visit the waits of a resume too.
    for turns in range(90):
        mesh = Mesh(admission=Admission(max_concurrent=1, max_queued=0, queue_timeout_s=1))
        mesh.script = deaths(mesh)

        async def consume(pipeline: Pipeline) -> None:
            async with aclosing(pipeline.generate(ask(10, choices=choices))) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(consume(mesh.pipeline()))
        ended = await run_until(mesh, task, turns=turns)
        task.cancel()
        await asyncio.wait([task])
        mesh.assert_nothing_is_held()
        if ended:
            assert task.exception() is None
            assert turns > 20
            return
    raise AssertionError("the request never ended")


def deaths(mesh: Mesh) -> Callable[[int], None]:
    def script(step: int) -> None:
        if step == 10:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica, LinkLost)
        if step == 14:
            mesh.fleet.revive(mesh.fleet.replicas[1])
        if step == 20:
            mesh.decoder.kill()

    return script


async def test_a_cancel_storm_leaves_nothing(mesh: Mesh) -> None:
    chance = random.Random(3)
    pipeline = mesh.pipeline()

    async def consume() -> int:
        got = Got()
        async with aclosing(pipeline.generate(ask(chance.randrange(5, 40)))) as events:
            async for event in events:
                got.add(event)
        return len(got.texts[0])

    tasks = [asyncio.create_task(consume()) for _ in range(200)]
    doomed = {task: chance.randrange(60) for task in tasks[::2]}
    for turn in range(150):
        for task in (one for one, at in doomed.items() if at == turn):
            task.cancel()
        mesh.step()
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    mesh.assert_nothing_is_held()
    assert pipeline.supervised == 0
    survivors = [result for result in results[1::2] if isinstance(result, int)]
    assert len(survivors) == 100
    assert all(result >= 5 for result in survivors)


async def test_outside_ids_that_are_equal_disturb_nobody(mesh: Mesh) -> None:
    pipeline = mesh.pipeline()

    async def consume() -> str:
        got = Got()
        async with aclosing(pipeline.generate(ask(request_id="same"))) as events:
            async for event in events:
                got.add(event)
        return got.texts[0]

    async with mesh.running():
        texts = await asyncio.gather(consume(), consume())
    assert set(texts) == {expected_text(PROMPT, 12)}


async def test_explain_sends_nothing(mesh: Mesh) -> None:
    count, prices = await mesh.pipeline().explain(ask())
    assert count == 19
    assert not prices
    assert not mesh.fleet.specs
    mesh.assert_nothing_is_held()
