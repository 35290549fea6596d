"""Who serves which model: for each model its groups, and its replicas on a board.

Knows how each replica stands because it is told when one changes; looks at those only.
Chooses nothing, knows no prompt and no wire. Instants come as `now`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from radixmesh.errors import ModelNotServed, NoReplicaReady
from router.fleet.ask import ModelInfo
from router.fleet.fitness import Fitness, Judges
from router.fleet.group import Group
from router.fleet.replica import Replica
from router.fleet.wire import GroupInfo
from router.policy.board import Board, Row
from router.policy.choice import Name, Standing


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides the keys of a prompt beside the prompt: replicas of a kind can be compared."""

    weight_version: str
    fingerprint: str
    block_tokens: int

    @classmethod
    def of(cls, info: GroupInfo) -> "Kind":
        """Return the kind of a group's replicas."""
        return cls(info.weight_version, info.fingerprint, info.block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A replica at its place: its group, its kind, its row."""

    group: Group
    replica: Replica
    kind: Kind
    row: Row


@dataclass(slots=True, eq=False)
class Model:
    """A model that is served: its groups, and its replicas by name, their rows by number."""

    name: str
    board: Board = field(default_factory=Board)
    groups: dict[str, GroupInfo] = field(default_factory=dict)
    sites: dict[Name, Site] = field(default_factory=dict)
    numbers: dict[int, Row] = field(default_factory=dict)
    kinds: dict[Kind, int] = field(default_factory=dict)  # how many replicas
    guessed: dict[Site, None] = field(default_factory=dict)  # whose views are not exact
    limits: ModelInfo | None = None

    def site_at(self, row: int) -> Site:
        """Return who is in a row of the board."""
        return self.sites[self.board.names[row]]

    def eligible(self) -> list[Site]:
        """Return who can be chosen."""
        return [self.site_at(row) for row in self.board.eligible_rows().tolist()]

    def info(self) -> ModelInfo:
        """Return what it takes: the least of all its groups."""
        if self.limits is None:
            infos = list(self.groups.values())
            self.limits = ModelInfo(
                name=self.name,
                max_model_len=_least(info.max_model_len for info in infos),
                fingerprint=infos[0].fingerprint,
                vocab_size=_least(info.vocab_size for info in infos),
                eos_ids=infos[0].eos_ids,
                ready_replicas=0,
            )
        return self.limits


def _least(limits: Iterable[int]) -> int:
    """The least limit; a group that says none sets none for the others. 0: none is known."""
    return min((limit for limit in limits if limit), default=0)


class Lineup:
    """All models.

    Args:
        stand: Says how a replica stands at an instant.
        judges: Say whether what became of its requests speaks against it.
    """

    def __init__(
        self, stand: Callable[[Group, Replica, float], Standing], judges: Judges | None = None
    ) -> None:
        self._stand = stand
        self._judges = judges or Judges()
        self._models: dict[str, Model] = {}
        self._served: dict[str, str] = {}  # group -> model
        self._silent: set[str] = set()
        self._homes: dict[Replica, tuple[Model, Site]] = {}
        self._changed: dict[Replica, None] = {}

    def __len__(self) -> int:
        """Replicas that are on a board."""
        return len(self._homes)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def expect(self, group_id: str) -> None:
        """A group is in the fleet that has not said yet what it serves."""
        self._silent.add(group_id)

    def serve(self, group: Group, info: GroupInfo) -> None:
        """A group said what it is; its replicas move when that changed."""
        self._silent.discard(group.group_id)
        if self._served.get(group.group_id) != info.model:
            self._quit(group.group_id)
            self._served[group.group_id] = info.model
        model = self._models.setdefault(info.model, Model(info.model))
        model.groups[group.group_id] = info
        model.limits = None
        for replica in group.replicas.values():
            self.enter(group, replica)

    def retire(self, group_id: str) -> None:
        """A group has left the fleet; its replicas have left before."""
        self._silent.discard(group_id)
        self._quit(group_id)

    def enter(self, group: Group, replica: Replica) -> None:
        """A replica is there, or its group has changed. Counts once the group said what it is."""
        self.leave(replica)
        if group.info is None:
            return
        model, kind = self._models[group.info.model], Kind.of(group.info)
        name = (replica.group_id, replica.dp_rank)
        site = Site(group, replica, kind, model.board.add(name))
        model.sites[name] = site
        model.numbers[replica.feed.number] = site.row
        model.kinds[kind] = model.kinds.get(kind, 0) + 1
        self._homes[replica] = model, site
        self.touch(replica)

    def leave(self, replica: Replica) -> None:
        """A replica is there no more."""
        self._changed.pop(replica, None)
        home = self._homes.pop(replica, None)
        if home is None:
            return
        model, site = home
        site.row.leave()
        model.guessed.pop(site, None)
        del model.sites[replica.group_id, replica.dp_rank], model.numbers[replica.feed.number]
        model.kinds[site.kind] -= 1
        if not model.kinds[site.kind]:
            del model.kinds[site.kind]

    def touch(self, replica: Replica) -> None:
        """A replica has changed."""
        self._changed[replica] = None

    def judge(self, group: Group) -> Fitness:
        """A life of one of its replicas begins: return what will be held against it."""
        return self._judges.fitness(group.info.model if group.info else "")

    def refresh(self, now: float) -> None:
        """Put those that have changed on their boards as they stand now."""
        while self._changed:
            replica, _ = self._changed.popitem()
            if replica in self._homes:
                model, site = self._homes[replica]
                site.row.set(self._stand(site.group, replica, now))
                if replica.guessed:
                    model.guessed[site] = None
                else:
                    model.guessed.pop(site, None)

    def find(self, name: str) -> Model:
        """Return a model; an empty name means the only one.

        A group that is away still counts as serving what it last said.

        Raises:
            ModelNotServed: No group serves it.
            NoReplicaReady: There is no group, or one has not said yet what it serves.
        """
        if not name and len(self._models) == 1:
            [name] = self._models
        model = self._models.get(name)
        if model is not None:
            return model
        if self._silent:
            raise NoReplicaReady("some worker groups have not answered yet")
        if not self._models:
            raise NoReplicaReady("this router has no worker group")
        raise ModelNotServed(f"no worker group serves {name!r}")

    def _quit(self, group_id: str) -> None:
        name = self._served.pop(group_id, None)
        if name is None:
            return
        model = self._models[name]
        del model.groups[group_id]
        model.limits = None
        if not model.groups:
            del self._models[name]
