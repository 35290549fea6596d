"""What each tenant may use: requests and tokens a minute, reserved before, settled after.

A bucket holds one minute's worth and fills evenly. A request is let in when the bucket
holds what it may use at most, or is full: one that is larger than the bucket leaves it
in debt, so that the rate holds in the long run. What was not used comes back at its end.

Own code, not a library's: those that are well kept (`limits` and its like) count up
only; none reserves, gives back, or goes into debt.

Pure: knows names and amounts; instants come as `now`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a tenant may use in a minute; 0 means no limit."""

    tokens: int = 0
    requests: int = 0

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return bool(self.tokens or self.requests)


class Bucket:
    """An amount that fills evenly up to a minute's worth.

    Args:
        per_minute: The rate, and the most that it holds.
        now: It is full then.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._at = now

    def __repr__(self) -> str:
        return f"<Bucket {self._level:g}/{self._capacity:g} at {self._at:g}>"

    def level(self, now: float) -> float:
        """Return what it holds; negative is a debt."""
        filled = self._capacity * max(0.0, now - self._at) / MINUTE_S
        return min(self._capacity, self._level + filled)

    def full(self, now: float) -> bool:
        """Whether it has forgotten all that was taken."""
        return self.level(now) >= self._capacity

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until so much may be taken, if nobody else takes any; 0: now."""
        missing = min(amount, self._capacity) - self.level(now)
        return max(0.0, missing) * MINUTE_S / self._capacity

    def take(self, amount: float, now: float) -> None:
        """Take, if need be more than there is."""
        self._level = self.level(now) - amount
        self._at = max(self._at, now)

    def give_back(self, amount: float, now: float) -> None:
        """Put back what was taken and not used; above the capacity it is lost."""
        self._level = min(self._capacity, self.level(now) + amount)
        self._at = max(self._at, now)


@dataclass(slots=True)
class Account:
    """One tenant's buckets; None where it has no limit."""

    tokens: Bucket | None
    requests: Bucket | None

    def idle(self, now: float) -> bool:
        """Whether a new account would be the same."""
        return all(bucket is None or bucket.full(now) for bucket in (self.tokens, self.requests))


def _opened(rate: Rate, now: float) -> Account:
    return Account(
        tokens=Bucket(rate.tokens, now) if rate.tokens else None,
        requests=Bucket(rate.requests, now) if rate.requests else None,
    )


@dataclass(slots=True, kw_only=True)
class Tenants:
    """The accounts of all tenants.

    At most `remembered` of those without a rate of their own are kept. One whose buckets
    are full again is forgotten for a new one; while there is none, new ones share an account.

    Attributes:
        default: Of tenants without a rate of their own; a request without a tenant is of "".
        own: Rates by tenant.
        remembered: How many accounts are kept.
    """

    default: Rate = field(default_factory=Rate)
    own: Mapping[str, Rate] = field(default_factory=dict)
    remembered: int = 10_000
    _accounts: OrderedDict[str, Account] = field(default_factory=OrderedDict)
    _named: dict[str, Account] = field(default_factory=dict)
    _crowd: Account | None = None

    def __len__(self) -> int:
        return len(self._accounts) + len(self._named)

    def account(self, tenant: str, now: float) -> Account | None:
        """Return a tenant's account; None when it has no limit."""
        if (rate := self.own.get(tenant)) is not None:
            if rate.limited and tenant not in self._named:
                self._named[tenant] = _opened(rate, now)
            return self._named.get(tenant)
        if not self.default.limited:
            return None
        account = self._accounts.get(tenant)
        if account is None:
            return self._new(tenant, now)
        self._accounts.move_to_end(tenant)
        return account

    def _new(self, tenant: str, now: float) -> Account:
        if len(self._accounts) >= self.remembered:
            oldest, account = next(iter(self._accounts.items()))
            if not account.idle(now):
                if self._crowd is None:
                    self._crowd = _opened(self.default, now)
                return self._crowd
            del self._accounts[oldest]
        account = self._accounts[tenant] = _opened(self.default, now)
        return account
