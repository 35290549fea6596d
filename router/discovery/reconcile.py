"""Lists of members -> joins, drains and leaves, by set difference. Pure: no loop, no clock.

Several sources may list into one reconciler: a member stays while one of them lists it. What
somebody added by hand is not known here and is left alone; what somebody removed by hand stays
away until its source has ceased to list it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from radixmesh.errors import AlreadyExists
from router.discovery.member import Member

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Target(Protocol[T]):
    """Where members join. What joins is known by a token afterwards."""

    def join(self, member: Member) -> T:
        """Take a member in.

        Raises:
            AlreadyExists: Somebody else is there.
        """
        ...

    def present(self, token: T, /) -> bool:
        """Whether it is still there, and not another of its name."""
        ...

    def drain(self, token: T, /) -> None:
        """Send it nothing new."""

    def undrain(self, token: T, /) -> None:
        """Send it work again."""

    def retire(self, token: T, /) -> None:
        """Send it nothing new; take it out when it has finished what it has."""

    def remove(self, token: T, /) -> None:
        """Take it out at once."""


@dataclass(slots=True)
class _Held(Generic[T]):
    """A member that joined through this reconciler."""

    member: Member
    token: T


class Reconciler(Generic[T]):
    """Keeps a target equal to what sources list.

    Args:
        target: Where members join.
    """

    def __init__(self, target: Target[T]) -> None:
        self._target = target
        self._listed: dict[str, dict[str, Member]] = {}
        self._held: dict[str, _Held[T]] = {}
        self._retired: dict[str, _Held[T]] = {}
        self._refused: set[str] = set()

    def __repr__(self) -> str:
        return f"<Reconciler {len(self._held)} members of {sorted(self._listed)}>"

    def __len__(self) -> int:
        return len(self._held)

    def publish(self, source: str, members: Iterable[Member]) -> None:
        """Take over what a source lists now: all that it lists, not only what changed."""
        listed = {member.key: member for member in members}
        gone = self._listed.get(source, {}).keys() - listed.keys()
        self._listed[source] = listed
        self._forget_left()
        for key in gone:
            if not any(key in others for others in self._listed.values()):
                self._leave(key)
        for member in listed.values():
            held = self._held.get(member.key)
            if held is None:
                self._join(member)
            elif held.member.draining is not member.draining:
                self._turn(held, member)

    def _forget_left(self) -> None:
        for key, held in list(self._retired.items()):
            if not self._target.present(held.token):
                del self._retired[key]

    def _leave(self, key: str) -> None:
        self._refused.discard(key)
        held = self._held.pop(key, None)
        if held is None or not self._target.present(held.token):
            return
        logger.info("member gone", extra={"member": key, "address": held.member.address})
        self._target.retire(held.token)
        if self._target.present(held.token):
            self._retired[key] = held

    def _join(self, member: Member) -> None:
        if member.draining:
            return  # it would get nothing
        self._make_room(member)
        try:
            token = self._target.join(member)
        except AlreadyExists as error:
            if member.key not in self._refused:
                self._refused.add(member.key)
                logger.warning(
                    "member not taken", extra={"member": member.key, "error": error.message}
                )
            return
        self._refused.discard(member.key)
        self._held[member.key] = _Held(member, token)
        logger.info("member joined", extra={"member": member.key, "address": member.address})

    def _make_room(self, member: Member) -> None:
        """Take out who is leaving from there: an address or a name belongs to who is listed."""
        for key, held in list(self._retired.items()):
            same_place = held.member.address == member.address
            if key == member.key:
                del self._retired[key]  # it is back; to join again undrains it
            elif same_place or (member.name and held.member.name == member.name):
                del self._retired[key]
                if self._target.present(held.token):
                    self._target.remove(held.token)

    def _turn(self, held: _Held[T], member: Member) -> None:
        held.member = member
        if not self._target.present(held.token):
            return
        logger.info(
            "member draining" if member.draining else "member back", extra={"member": member.key}
        )
        if member.draining:
            self._target.drain(held.token)
        else:
            self._target.undrain(held.token)
