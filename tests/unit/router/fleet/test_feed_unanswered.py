"""A replica that goes on telling of changes and never sends what was asked for."""

import operator
from functools import reduce

from router.fleet.changes import Chunk, Digest, Stored
from router.fleet.feed import REST_MAX_S, Feed, Index
from router.fleet.held import HELD_KEYS_LIMIT
from router.policy.choice import View

MINUTES = 20


class Deaf:
    """Its feed, with one change lost; the clock goes on by half seconds."""

    def __init__(self) -> None:
        self.index = Index()
        self.asked: list[float] = []
        self.now = 0.0
        self.sequence = 0
        self.feed = Feed(
            self.index,
            ask=lambda: self.asked.append(self.now),
            on_lost=lambda _: None,
            name="deaf",
        )
        self.feed.begin(self.now)
        self.snapshot()
        self.sequence += 1  # this one never comes

    def view(self) -> View:
        return self.feed.view

    def snapshot(self) -> None:
        keys = range(1, self.sequence + 1)
        chunk = Chunk(self.sequence, keys, [0] * len(keys), first=True, last=True)
        self.feed.on_chunk(chunk, self.now)

    def half_second(self) -> None:
        self.now += 0.5
        self.sequence += 1
        self.feed.on_change(self.sequence, Stored(0, [self.sequence]), self.now)
        xor = reduce(operator.xor, range(1, self.sequence + 1))
        self.feed.on_digest(Digest(self.sequence, self.sequence, xor), self.now)
        self.feed.tick(self.now)


def test_it_is_asked_at_a_bounded_rate_and_known_again_when_it_answers() -> None:
    deaf = Deaf()
    assert deaf.view() is View.EXACT
    views = []
    for _ in range(MINUTES * 120):
        deaf.half_second()
        views.append(deaf.view())
        assert len(deaf.index.tree) == 0, "what follows a gap is no picture"
        assert deaf.feed._held.size <= HELD_KEYS_LIMIT
    assert View.EXACT not in views
    assert views[-1] is View.BLIND
    assert views.index(View.BLIND) <= 120
    assert len(deaf.asked) <= 3 + 8 + MINUTES * 60 / REST_MAX_S
    assert deaf.asked[-1] > MINUTES * 60 - 2 * REST_MAX_S, "it is not given up for ever"
    asked = len(deaf.asked)
    while len(deaf.asked) == asked:
        deaf.half_second()
    deaf.snapshot()
    assert deaf.view() is View.EXACT
