"""The shape of the index: parents, and which branch was useful longest ago.

Knows keys only; knows no replicas and no bytes. A branch is a leaf and all keys
above it up to the first fork, so dropping the oldest branch never leaves a key
without its ancestors.
"""

from collections import OrderedDict


class Branches:
    """A forest of keys with its leaves in order of use.

    Nearly every key has exactly one child, so only the exceptions are stored:
    leaves (none) and forks (two or more).
    """

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._leaves: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._forks: dict[int, int] = {}  # key -> number of children, two or more

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, key: int, parent: int) -> None:
        """Add a new key below `parent` (0: none). The parent must be there."""
        self._parents[key] = parent
        if parent:
            if parent in self._leaves:
                del self._leaves[parent]
            else:
                self._forks[parent] = self._forks.get(parent, 1) + 1
        self._leaves[key] = None

    def is_leaf(self, key: int) -> bool:
        """Whether nothing hangs below a key."""
        return key in self._leaves

    def drop(self, leaf: int) -> int:
        """Remove a leaf; return its parent, or 0.

        Raises:
            KeyError: It is no leaf.
        """
        del self._leaves[leaf]
        parent = self._parents.pop(leaf)
        if not parent:
            return 0
        children = self._forks.get(parent, 1) - 1
        if children >= 2:
            self._forks[parent] = children
        elif children == 1:
            del self._forks[parent]
        else:
            self._leaves[parent] = None
        return parent

    def touch(self, key: int) -> None:
        """Make the branch that ends in `key` the youngest; nothing when it is no leaf."""
        if key in self._leaves:
            self._leaves.move_to_end(key)

    def oldest(self) -> list[int]:
        """The keys of the branch that was useful longest ago, leaf first; empty when there is none.

        The branch ends below the first key that has another child.
        """
        key = next(iter(self._leaves), 0)
        branch = []
        while key:
            branch.append(key)
            key = self._parents[key]
            if key in self._forks:
                break
        return branch

    def compact(self) -> None:
        """Give back the memory of what was removed."""
        self._parents = dict(self._parents.items())
        self._leaves = OrderedDict.fromkeys(self._leaves)
        self._forks = dict(self._forks.items())
