"""What one output has been given, whatever dies in between."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.blocks import pack_ids, unpack_ids
from radixmesh.errors import InternalError, TokenizerMismatch
from router.journal import Ending, Fresh, Journal, Verdict
from router.request import FinishReason

EOS = 2


def journal(**changes: object) -> Journal:
    return Journal(**{"limit": 100, **changes})  # type: ignore[arg-type]


def taken(into: Journal, attempt: int, position: int, *ids: int, finish: int = 0) -> Verdict:
    return into.take_ids(attempt, position, pack_ids(ids), finish=finish)


def test_ids_of_the_current_attempt_at_the_next_position_are_taken() -> None:
    one = journal()
    attempt = one.begin_attempt()
    assert taken(one, attempt, 0, 5, 6) is Verdict.TAKEN
    assert taken(one, attempt, 2, 7) is Verdict.TAKEN
    assert list(unpack_ids(one.ids)) == [5, 6, 7]


def test_ids_of_an_earlier_attempt_are_dropped() -> None:
    one = journal()
    old = one.begin_attempt()
    taken(one, old, 0, 5)
    new = one.begin_attempt()
    assert taken(one, old, 1, 6) is Verdict.DROPPED
    assert taken(one, new, 1, 7) is Verdict.TAKEN
    assert list(unpack_ids(one.ids)) == [5, 7]


def test_after_a_fence_nobody_is_heard() -> None:
    one = journal()
    attempt = one.begin_attempt()
    one.fence()
    assert taken(one, attempt, 0, 5) is Verdict.DROPPED


def test_ids_that_repeat_a_position_are_dropped_and_a_skipped_position_is_a_gap() -> None:
    one = journal()
    attempt = one.begin_attempt()
    taken(one, attempt, 0, 5)
    assert taken(one, attempt, 0, 5) is Verdict.DROPPED
    assert taken(one, attempt, 2, 9) is Verdict.GAP
    assert one.position == 1


def test_nothing_follows_an_end_at_the_worker() -> None:
    one = journal()
    attempt = one.begin_attempt()
    taken(one, attempt, 0, 5, finish=FinishReason.LENGTH)
    assert one.complete
    assert taken(one, attempt, 1, 6) is Verdict.DROPPED


def test_a_stop_id_counts_and_is_not_shown_to_the_detokenizer() -> None:
    one = journal()
    reader = one.begin_reader()
    taken(one, one.begin_attempt(), 0, 5, EOS, finish=FinishReason.STOP_TOKEN)
    assert one.readable_ids(0) == pack_ids([5])
    fresh = one.finish(reader, "five", 1)
    assert fresh is not None
    assert (fresh.text, list(unpack_ids(fresh.ids))) == ("five", [5, EOS])
    assert one.completion_tokens == 2
    assert one.finish_reason is FinishReason.STOP_TOKEN


@pytest.mark.parametrize(
    ("ids", "reason"),
    [((5, 6, 7), FinishReason.LENGTH), ((5, EOS), FinishReason.STOP_TOKEN)],
)
def test_an_output_that_is_at_its_end_is_complete_though_the_worker_died_before_it_said_so(
    ids: tuple[int, ...], reason: FinishReason
) -> None:
    one = journal(limit=3, stop_ids=[EOS])
    taken(one, one.begin_attempt(), 0, *ids)
    assert one.complete
    assert one.finish_reason is reason


@pytest.mark.parametrize(
    ("ids", "finish"),
    [((5, 6, 7, 8), 0), ((5, 9), 0), ((9,), FinishReason.LENGTH), ((), FinishReason.STOP_TOKEN)],
)
def test_ids_that_can_not_be_are_a_gap_and_change_nothing(
    ids: tuple[int, ...], finish: int
) -> None:
    one = journal(limit=3, vocab_size=9)
    assert taken(one, one.begin_attempt(), 0, *ids, finish=finish) is Verdict.GAP
    assert one.position == 0
    assert not one.complete
    assert taken(one, one.begin_attempt(), 0, 5, 6, 8) is Verdict.TAKEN


def test_an_end_for_a_reason_from_the_future_is_an_end() -> None:
    one = journal()
    taken(one, one.begin_attempt(), 0, 5, finish=9)
    assert one.complete
    assert one.finish_reason is FinishReason.LENGTH


def test_a_stop_id_before_min_tokens_ends_nothing() -> None:
    one = journal(stop_ids=[EOS], min_tokens=2)
    attempt = one.begin_attempt()
    taken(one, attempt, 0, EOS)
    assert not one.complete
    taken(one, attempt, 1, EOS)
    assert one.complete


def test_a_stop_string_beats_the_stop_id_and_later_ids_do_not_count() -> None:
    one = journal()
    reader = one.begin_reader()
    taken(one, one.begin_attempt(), 0, 5, 6, 7, EOS, finish=FinishReason.STOP_TOKEN)
    fresh = one.finish(reader, "five", 2, stop_matched="six")
    assert fresh is not None
    assert list(unpack_ids(fresh.ids)) == [5, 6]
    assert one.completion_tokens == 2
    assert one.finish_reason is FinishReason.STOP_STRING
    assert one.stop_matched == "six"


def test_the_terminal_state_is_set_once() -> None:
    one = journal()
    reader = one.begin_reader()
    assert one.end(Ending.CANCELLED)
    assert not one.end(Ending.FAILED)
    assert one.finish(reader, "late", 0) is None
    assert not one.take_text(reader, "late", 0)
    assert one.ending is Ending.CANCELLED


def test_a_replay_gives_only_what_was_not_delivered() -> None:
    one = journal()
    old = one.begin_reader()
    taken(one, one.begin_attempt(), 0, 5, 6, 7)
    assert one.take_text(old, "five ", 1).text == "five "
    new = one.begin_reader()
    assert not one.take_text(old, "from the dead", 2)
    assert one.readable_ids(0) == pack_ids([5, 6, 7])
    fresh = one.take_text(new, "five six ", 2)
    assert (fresh.text, fresh.ids) == ("six ", pack_ids([6]))


def test_a_replay_that_gives_other_text_is_an_error() -> None:
    one = journal()
    taken(one, one.begin_attempt(), 0, 5, 6)
    one.take_text(one.begin_reader(), "five ", 1)
    with pytest.raises(TokenizerMismatch):
        one.take_text(one.begin_reader(), "cinq ", 1)


@pytest.mark.parametrize("consumed", [3, 99])
def test_a_detokenizer_that_counts_ids_it_was_not_sent_is_an_error(consumed: int) -> None:
    one = journal()
    reader = one.begin_reader()
    taken(one, one.begin_attempt(), 0, 5, 6)
    with pytest.raises(InternalError):
        one.take_text(reader, "text", consumed)


def test_a_detokenizer_that_is_done_before_the_worker_is_an_error() -> None:
    one = journal()
    reader = one.begin_reader()
    taken(one, one.begin_attempt(), 0, 5)
    with pytest.raises(InternalError):
        one.finish(reader, "five", 1)


def test_log_probabilities_are_released_with_the_text_that_covers_them() -> None:
    one = journal(logprobs=True)
    reader = one.begin_reader()
    one.take_ids(one.begin_attempt(), 0, pack_ids([5, 6]), [-0.5, -0.25])
    fresh = one.take_text(reader, "a", 1, [b"a"])
    assert [(lp.token_id, lp.raw, lp.logprob) for lp in fresh.logprobs] == [(5, b"a", -0.5)]
    replay = one.begin_reader()
    fresh = one.take_text(replay, "ab", 2, [b"a", b"b"])
    assert [(lp.token_id, lp.raw, lp.logprob) for lp in fresh.logprobs] == [(6, b"b", -0.25)]


# Any sequence of kills


STOP = "xyx"


def word(token: int) -> str:
    return "abxy"[token % 4]


def next_id(ids: list[int], seed: int) -> int:
    """What the model says after `ids`: it follows from all of them."""
    return random.Random(f"{seed}:{ids}").randrange(3, 40)


@dataclass
class Detokenizer:
    """Holds back what may become the stop; says what is certain."""

    ids: list[int] = field(default_factory=list)
    said: int = 0
    done: bool = False

    def text(self) -> str:
        return "".join(map(word, self.ids))

    def piece(self) -> tuple[str, int]:
        certain = len(self.text())
        for held in range(len(STOP) - 1, 0, -1):
            if self.text().endswith(STOP[:held]):
                certain -= held
                break
        certain = max(certain, self.said)
        text, self.said = self.text()[self.said : certain], certain
        return text, certain


@dataclass
class Uninterrupted:
    ids: list[int]
    text: str
    reason: FinishReason
    count: int


def uninterrupted(seed: int, limit: int, eos_at: int) -> Uninterrupted:
    ids: list[int] = []
    while True:
        ids.append(EOS if len(ids) == eos_at else next_id(ids, seed))
        seen = "".join(map(word, ids if ids[-1] != EOS else ids[:-1]))
        if STOP in seen:
            return Uninterrupted(ids, seen.replace(STOP, ""), FinishReason.STOP_STRING, len(ids))
        if ids[-1] == EOS:
            return Uninterrupted(ids, seen, FinishReason.STOP_TOKEN, len(ids))
        if len(ids) == limit:
            return Uninterrupted(ids, seen, FinishReason.LENGTH, len(ids))


class Mesh:
    """A worker and a detokenizer around a journal, killed as `chance` says."""

    def __init__(self, seed: int, limit: int, eos_at: int, chance: random.Random) -> None:
        self.seed, self.limit, self.eos_at, self.chance = seed, limit, eos_at, chance
        self.journal = Journal(limit=limit, stop_ids=[EOS], logprobs=True)
        self.text: list[str] = []
        self.ids: list[int] = []
        self.raws: list[bytes] = []
        self.attempt = self.journal.begin_attempt()
        self.reader = self.journal.begin_reader()
        self.detokenizer = Detokenizer()

    def run(self) -> None:
        while self.journal.ending is None:
            match self.chance.randrange(6):
                case 0 if not self.journal.complete:
                    stale = self.attempt
                    self.attempt = self.journal.begin_attempt()
                    self.generate(stale, expect=Verdict.DROPPED)
                case 1:
                    self.reader = self.journal.begin_reader()
                    self.detokenizer = Detokenizer()
                case 2 | 3 if not self.journal.complete:
                    self.generate(self.attempt, expect=Verdict.TAKEN)
                case _:
                    self.read()

    def generate(self, attempt: int, *, expect: Verdict) -> None:
        ids = list(unpack_ids(self.journal.ids))
        start, fresh, finish = len(ids), [], 0
        for _ in range(self.chance.randrange(1, 4)):
            fresh.append(EOS if len(ids) == self.eos_at else next_id(ids, self.seed))
            ids.append(fresh[-1])
            if fresh[-1] == EOS or len(ids) == self.limit:
                finish = FinishReason.STOP_TOKEN if fresh[-1] == EOS else FinishReason.LENGTH
                break
        # Half of the time the worker dies before it says why it ended.
        finish = finish if self.chance.random() < 0.5 else 0
        logprobs = [-float(token) for token in fresh]
        verdict = self.journal.take_ids(attempt, start, pack_ids(fresh), logprobs, finish)
        assert verdict is expect

    def read(self) -> None:
        """The detokenizer gets up to two more ids, then says what is certain, or the end."""
        tok = self.detokenizer
        before = tok.said
        for token in unpack_ids(self.journal.readable_ids(len(tok.ids)))[:2]:
            tok.ids.append(token)
            if STOP in tok.text():
                tail = tok.text()[tok.said :].removesuffix(STOP)
                self.deliver_end(tail, before, stop=STOP)
                return
        if self.journal.complete and len(tok.ids) == self.journal.readable:
            self.deliver_end(tok.text()[tok.said :], before)
            return
        text, certain = tok.piece()
        raws = [word(token).encode() for token in tok.ids[before:certain]]
        self.deliver(self.journal.take_text(self.reader, text, certain, raws))

    def deliver_end(self, tail: str, before: int, *, stop: str = "") -> None:
        tok = self.detokenizer
        raws = [word(token).encode() for token in tok.ids[before:]]
        fresh = self.journal.finish(
            self.reader, tail, len(tok.ids), stop_matched=stop, token_bytes=raws
        )
        assert fresh is not None
        self.deliver(fresh)

    def deliver(self, fresh: Fresh) -> None:
        self.text.append(fresh.text)
        self.ids.extend(unpack_ids(fresh.ids))
        self.raws.extend(one.raw for one in fresh.logprobs)
        assert [-one.logprob for one in fresh.logprobs] == list(unpack_ids(fresh.ids))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    limit=st.integers(1, 40),
    eos_at=st.integers(0, 60),
    chance=st.integers(0, 1 << 32),
)
def test_whatever_is_killed_the_client_gets_what_it_would_have_got(
    seed: int, limit: int, eos_at: int, chance: int
) -> None:
    whole = uninterrupted(seed, limit, eos_at)
    mesh = Mesh(seed, limit, eos_at, random.Random(chance))
    mesh.run()
    assert "".join(mesh.text) == whole.text
    assert mesh.ids == whole.ids
    assert mesh.journal.finish_reason is whole.reason
    assert mesh.journal.completion_tokens == whole.count
    shown = [token for token in whole.ids if token != EOS]
    assert mesh.raws[: len(shown)] == [word(token).encode() for token in shown]
