"""Replicas as the index names them: a number for good, a bit for as long as it is needed.

A replica that is cleared gives its bit away at once; the bit is given to another only when
no mask has it any more. Knows bits; knows no keys.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """What one replica holds: its bit, and the digest of all its events.

    Attributes:
        marked: Whether masks may contain the bit.
    """

    slot: int
    bit: int
    block_count: int = 0
    xor_keys: int = 0
    marked: bool = False


class Holders:
    """All replicas, and whose bit is whose.

    Attributes:
        live: The bits of replicas.
        dead: Bits that masks may have and that name nobody.
        partial: Bits of those of which the index does not have everything.
        slot_count: Width of the masks in bits.
    """

    def __init__(self) -> None:
        self.live = 0
        self.dead = 0
        self.partial = 0
        self.slot_count = 0
        self._replicas: dict[int, Holding] = {}
        self._owners: dict[int, int] = {}  # bit -> replica, live ones only
        self._free_slots: list[int] = []
        self._next = 1
        # For each eight bits: whom a byte of a mask names there.
        self._members: list[dict[int, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, replica: int) -> Holding:
        return self._replicas[replica]

    def join(self) -> int:
        """Return the number of a new replica."""
        replica = self._next
        self._next += 1
        self._replicas[replica] = self._take_slot(replica)
        return replica

    def leave(self, replica: int) -> None:
        """A replica is gone; its number is never used again."""
        self._retire(self._replicas.pop(replica))

    def renew(self, replica: int) -> Holding:
        """A replica holds nothing any more: give it another bit, and an empty digest."""
        self._retire(self._replicas[replica])
        held = self._replicas[replica] = self._take_slot(replica)
        return held

    def bury(self, bits: int) -> None:
        """No mask has these dead bits any more: they may be given away."""
        for bit in _bits(bits):
            heapq.heappush(self._free_slots, bit.bit_length() - 1)
        self.dead &= ~bits

    def note(self, depths: dict[int, int], bits: int, depth: int) -> None:
        """Give a depth to the replicas that some live bits name."""
        owner = self._owners.get(bits)
        if owner is not None:
            depths[owner] = depth
            return
        for place, byte in enumerate(bits.to_bytes(-(-bits.bit_length() // 8), "little")):
            if byte:
                known = self._members[place]
                members = known.get(byte)
                if members is None:
                    members = known[byte] = self._find_members(place, byte)
                depths.update(dict.fromkeys(members, depth))

    def _find_members(self, place: int, byte: int) -> tuple[int, ...]:
        return tuple([self._owners[bit << 8 * place] for bit in _bits(byte)])

    def _take_slot(self, replica: int) -> Holding:
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = self.slot_count
            self.slot_count += 1
            if slot % 8 == 0:
                self._members.append({})
        bit = 1 << slot
        self.live |= bit
        self._owners[bit] = replica
        return Holding(slot, bit)

    def _retire(self, held: Holding) -> None:
        self._members[held.slot // 8].clear()
        self.live &= ~held.bit
        self.partial &= ~held.bit
        del self._owners[held.bit]
        if held.marked:
            self.dead |= held.bit
        else:
            heapq.heappush(self._free_slots, held.slot)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
