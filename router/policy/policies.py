"""The policies by the names that `--policy` takes. Knows classes, holds no instance."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from router.policy.baselines import (
    CacheAware,
    ConsistentHash,
    LeastLoad,
    PowerOfTwo,
    RoundRobin,
    Uniform,
)
from router.policy.choice import Policy
from router.policy.price import Price

_CLASSES: Final = (Price, CacheAware, LeastLoad, PowerOfTwo, RoundRobin, Uniform, ConsistentHash)

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = MappingProxyType(
    {policy.name: policy for policy in _CLASSES}
)
