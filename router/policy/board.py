"""All replicas of a model in columns, so that a choice costs a few operations on arrays.

Knows how each stands, as it was told; prices a request at all of them at once. Knows
no wire, no clock, no cache: what a replica holds of a prompt comes with the question.
"""

from collections.abc import Sequence
from statistics import median

import numpy as np

from router.policy.choice import Floats, Ints, Name, Prices, Standing, Wish
from router.policy.price import (
    SHAPE,
    Crowd,
    Shape,
    Terms,
    evicted_blocks,
    expected_output,
    lost_s,
    terms,
)

# Rates of a replica that has learned none, in a fleet that has learned none.
DEFAULT_PREFILL_RATE = 4000.0
DEFAULT_DECODE_STEP_S = 0.03

# Columns: block_tokens and requests, the terms, the rest of a crowd; what a crowd sums is last.
_COLUMNS = 2 + len(Terms._fields) + len(Crowd._fields) - 1
_CROWD = _COLUMNS - len(Crowd._fields)


class Row:
    """One replica's place on a board. `index` changes when others leave."""

    __slots__ = ("_board", "index")

    def __init__(self, board: "Board", index: int) -> None:
        self._board = board
        self.index = index

    def set(self, standing: Standing) -> None:
        """The replica stands so from now on."""
        self._board.put(self, standing)

    def leave(self) -> None:
        """It is on the board no more."""
        self._board.drop(self)


class Board:
    """Replicas of one model. `shape` has the constants of the price."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        self._shape = shape
        self._rows: list[Row] = []
        self.names: list[Name] = []
        self.standings: list[Standing] = []
        self._columns = np.zeros((_COLUMNS, 8))
        self._eligible = np.zeros(8, bool)
        # Who has learned no rate is like its siblings: a fixed guess would starve it beside
        # faster ones, and it would never learn.
        self._unlearned: set[Row] = set()
        self._rates_changed = False
        self._rate, self._step_s = DEFAULT_PREFILL_RATE, DEFAULT_DECODE_STEP_S
        self._places: Floats | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: Name) -> Row:
        """Return the row of a new replica, which can't be chosen before it is `set`."""
        if len(self._rows) == len(self._eligible):
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
            self._eligible = np.concatenate((self._eligible, np.zeros_like(self._eligible)))
        self._places = None
        row = Row(self, len(self._rows))
        self._rows.append(row)
        self.names.append(name)
        self.standings.append(Standing(reason="new"))
        self.put(row, self.standings[-1])
        return row

    def drop(self, row: Row) -> None:
        """Take a row off; the last one takes its index."""
        last, name, standing = self._rows.pop(), self.names.pop(), self.standings.pop()
        self._unlearned.discard(row)
        self._places = None
        if last is not row:
            self._columns[:, row.index] = self._columns[:, last.index]
            self._eligible[row.index] = self._eligible[last.index]
            last.index = row.index
            self._rows[row.index] = last
            self.names[row.index], self.standings[row.index] = name, standing

    def put(self, row: Row, standing: Standing) -> None:
        """A replica stands so from now on."""
        was = self.standings[row.index]
        self.standings[row.index] = standing
        if (was.prefill_rate, was.decode_step_s) != (standing.prefill_rate, standing.decode_step_s):
            self._rates_changed = True
        if standing.prefill_rate > 0 and standing.decode_step_s > 0:
            self._unlearned.discard(row)
        else:
            self._unlearned.add(row)
        self._eligible[row.index] = not standing.reason
        self._write(row)

    def eligible_rows(self) -> Ints:
        """Return the rows of those that can be chosen."""
        return self._eligible[: len(self._rows)].nonzero()[0]

    def price(self, matched_blocks: Sequence[int] | Ints, wish: Wish) -> Prices:
        """Price a request at every replica, those that can't be chosen included.

        Args:
            matched_blocks: Blocks of the prompt that each row holds or is about to hold.
            wish: The request.
        """
        self._learn()
        count = len(self._rows)
        columns, eligible = self._columns[:, :count], self._eligible[:count]
        block, requests, token_s, seat_s, crowding_s, unused, free, queue_s = columns[: _CROWD + 1]
        output = expected_output(wish.max_tokens)
        matched = np.asarray(matched_blocks, np.float64)
        held = matched * block
        missing = np.maximum(1.0, wish.prompt_tokens - held)
        prefill = missing * token_s
        wait = queue_s + output * seat_s
        crowding = output * crowding_s
        needed = np.ceil((missing + output) / block)
        eviction = evicted_blocks(needed, unused, free, self._shape) * (block * token_s)
        crowd = Crowd(*(columns[_CROWD:] @ eligible).tolist())
        if crowd.replicas:
            lanes = self._lane_places()
            lost = lost_s(held * eligible, wish.prompt_tokens, crowd, lanes, self._shape)
            alpha = 1 + lost / prefill
        else:
            alpha = np.ones(count)
        return Prices(
            names=self.names,
            standings=self.standings,
            eligible=eligible,
            block_tokens=block,
            matched_blocks=matched,
            alpha=alpha,
            wait_s=wait,
            prefill_s=prefill,
            crowding_s=crowding,
            eviction_s=eviction,
            total_s=wait + alpha * prefill + crowding + eviction,
            requests=requests,
        )

    def _lane_places(self) -> Floats:
        """Return where each row stands in the order of names: 0 first, towards 1.

        All routers know the same names, so they agree on it.
        """
        if self._places is None:
            count = len(self.names)
            self._places = np.empty(count)
            order = sorted(range(count), key=self.names.__getitem__)
            self._places[order] = np.cbrt(np.arange(count) / max(1, count))
        return self._places

    def _write(self, row: Row) -> None:
        standing = self.standings[row.index]
        rate = standing.prefill_rate or self._rate
        step_s = standing.decode_step_s or self._step_s
        found = terms(standing, rate, step_s, self._shape)
        self._columns[:, row.index] = (
            standing.block_tokens,
            standing.running + standing.waiting,
            *found,
            1.0,
            1 / (1 + standing.waiting),
            rate,
        )

    def _learn(self) -> None:
        """Take what the others have learned for those who have learned nothing."""
        if not self._unlearned or not self._rates_changed:
            return
        self._rates_changed = False
        rates = [each.prefill_rate for each in self.standings if each.prefill_rate > 0]
        steps = [each.decode_step_s for each in self.standings if each.decode_step_s > 0]
        self._rate = median(rates) if rates else DEFAULT_PREFILL_RATE
        self._step_s = median(steps) if steps else DEFAULT_DECODE_STEP_S
        for row in self._unlearned:
            self._write(row)
