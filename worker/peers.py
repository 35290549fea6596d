"""The error that a rank ends with when it cannot go on without another one."""

from radixmesh.errors import GroupLost


class PeerLost(GroupLost):
    """Another rank of the replica is gone or answers no more; the replica cannot go on."""


class PeerGone(PeerLost):
    """The other rank's process has ended, as far as this one can tell; it is not just silent."""
