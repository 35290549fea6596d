"""Policies that users know from elsewhere, to compare with. They ignore prices and say so."""

from collections.abc import Sequence
from random import Random

from router.policy.choice import CandidatePrice, Choice


class RoundRobin:
    """Each replica in turn, in order of name. Replicas that come and go don't reset the turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)

    def choose(self, prices: Sequence[CandidatePrice], rng: Random) -> Choice:
        """Choose the first one after the last choice, or the first of all."""
        del rng
        ordered = sorted(prices, key=_name)
        chosen = next((price for price in ordered if _name(price) > self._last), ordered[0])
        self._last = _name(chosen)
        return Choice(chosen, self.name)


class Uniform:
    """Any replica, with equal chance."""

    name = "random"

    def choose(self, prices: Sequence[CandidatePrice], rng: Random) -> Choice:
        """Draw one."""
        return Choice(rng.choice(prices), self.name)


def _name(price: CandidatePrice) -> tuple[str, int]:
    return price.group_id, price.dp_rank
