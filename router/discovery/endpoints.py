"""EndpointSlices -> members. Pure: takes the API's objects as they come, asks nobody.

A pod is known by its uid and address: whoever gets its address after it is somebody else. One
that is not ready is listed all the same, and judged by its link; one that terminates drains.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from router.discovery.member import Member, at_address

Slice = Mapping[str, Any]

_FAMILIES = ("IPv4", "IPv6")


def members_of(slices: Iterable[Slice], port: str) -> list[Member]:
    """Return who is behind slices, each pod once.

    Args:
        slices: Objects of `discovery.k8s.io/v1`; those of one Service, of both families.
        port: The name or the number of a port; empty: the only one that a slice has.
    """
    by_pod: dict[str, Member] = {}
    for each in sorted(slices, key=_family):
        for pod, member in _of_slice(each, port):
            # A pod in two slices: while it moves between them, or with both families.
            if pod not in by_pod or (member.draining and member.key == by_pod[pod].key):
                by_pod[pod] = member
    by_address: dict[str, Member] = {}
    for member in by_pod.values():
        other = by_address.get(member.address)
        if other is None or other.draining:  # the address was given to another pod
            by_address[member.address] = member
    return list(by_address.values())


def _family(each: Slice) -> int:
    family = each.get("addressType")
    return _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)


def _of_slice(each: Slice, port: str) -> Iterator[tuple[str, Member]]:
    number = port_of(each, port)
    if number is None or each.get("addressType") not in _FAMILIES:
        return
    ipv6 = each["addressType"] == "IPv6"
    for endpoint in each.get("endpoints") or ():
        addresses = endpoint.get("addresses")
        if not addresses:
            continue
        # All addresses of an endpoint are the same one; the API says to use the first.
        address = at_address(addresses[0], number, ipv6=ipv6)
        target = endpoint.get("targetRef") or {}
        uid = target.get("uid", "")
        conditions = endpoint.get("conditions") or {}
        yield (
            uid or address,
            Member(
                key=f"{uid}@{address}" if uid else address,
                address=address,
                name=target.get("name", "") if uid else "",
                draining=bool(conditions.get("terminating")),
            ),
        )


def port_of(each: Slice, wanted: str) -> int | None:
    """Return the number of a slice's port, or None when it has none that is wanted."""
    if wanted.isdecimal():
        return int(wanted)
    numbers = {
        port.get("name") or "": port["port"]
        for port in each.get("ports") or ()
        if port.get("port") and port.get("protocol", "TCP") == "TCP"
    }
    if wanted:
        return numbers.get(wanted)
    return next(iter(numbers.values())) if len(numbers) == 1 else None
