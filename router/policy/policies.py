"""The policies by the names that `--policy` takes. Knows classes, holds no instance."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from router.policy.baselines import RoundRobin, Uniform
from router.policy.choice import Policy
from router.policy.price import Price

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = MappingProxyType(
    {"price": Price, "round_robin": RoundRobin, "random": Uniform}
)
