"""What EndpointSlices say: who is there, at which port, and who is about to go."""

from typing import Any

import pytest

from router.discovery.endpoints import members_of, port_of
from router.discovery.member import Member
from tests.fakes.kubernetes import endpoint_slice, pod


def test_a_pod_is_known_by_its_uid_and_its_address() -> None:
    [member] = members_of([endpoint_slice("s", [pod("u1", "10.0.0.1", name="worker-0")])], "")
    assert member == Member(key="u1@10.0.0.1:30100", address="10.0.0.1:30100", name="worker-0")


def test_another_pod_at_the_same_address_is_another_member() -> None:
    before = members_of([endpoint_slice("s", [pod("u1", "10.0.0.1")])], "")
    after = members_of([endpoint_slice("s", [pod("u2", "10.0.0.1")])], "")
    assert before[0].address == after[0].address
    assert before[0].key != after[0].key


@pytest.mark.parametrize("ready", [True, False, None])
def test_a_pod_that_is_not_ready_is_listed_and_not_draining(ready: bool | None) -> None:
    [member] = members_of([endpoint_slice("s", [pod("u1", "10.0.0.1", ready=ready)])], "")
    assert not member.draining


def test_a_pod_that_terminates_drains_even_though_it_serves() -> None:
    found = endpoint_slice("s", [pod("u1", "10.0.0.1", ready=True, terminating=True)])
    assert members_of([found], "")[0].draining


def test_an_address_that_was_given_away_belongs_to_the_pod_that_stays() -> None:
    old, new = pod("u1", "10.0.0.1", terminating=True), pod("u2", "10.0.0.1")
    for endpoints in ([old, new], [new, old]):
        members = members_of([endpoint_slice("s", endpoints)], "")
        assert [member.key for member in members] == ["u2@10.0.0.1:30100"]


def test_a_pod_with_both_families_is_one_member() -> None:
    slices = [
        endpoint_slice("six", [pod("u1", "fd00::1")], family="IPv6"),
        endpoint_slice("four", [pod("u1", "10.0.0.1")]),
    ]
    assert [member.address for member in members_of(slices, "")] == ["10.0.0.1:30100"]
    assert [member.address for member in members_of(slices[:1], "")] == ["[fd00::1]:30100"]


def test_a_pod_that_two_slices_list_is_one_member_and_drains_if_one_says_so() -> None:
    slices = [
        endpoint_slice("a", [pod("u1", "10.0.0.1")]),
        endpoint_slice("b", [pod("u1", "10.0.0.1", terminating=True)]),
    ]
    for order in (slices, slices[::-1]):
        [member] = members_of(order, "")
        assert member.draining


def test_an_endpoint_without_a_pod_is_known_by_its_address() -> None:
    bare: dict[str, Any] = {"addresses": ["10.0.0.9"]}
    [member] = members_of([endpoint_slice("s", [bare])], "")
    assert member == Member(key="10.0.0.9:30100", address="10.0.0.9:30100")


@pytest.mark.parametrize("empty", [None, []])
def test_slices_without_endpoints_or_addresses_list_nobody(empty: list[Any] | None) -> None:
    found = endpoint_slice("s", [])
    found["endpoints"] = empty
    assert members_of([found], "") == []
    assert members_of([endpoint_slice("s", [{"addresses": empty}])], "") == []


def test_names_for_hosts_are_not_listed() -> None:
    assert members_of([endpoint_slice("s", [pod("u", "a.example")], family="FQDN")], "") == []


@pytest.mark.parametrize(
    ("wanted", "number"), [("", None), ("grpc", 1), ("metrics", 2), ("http", None), ("77", 77)]
)
def test_a_port_is_chosen_by_name_or_number_or_for_being_the_only_one(
    wanted: str, number: int | None
) -> None:
    found = endpoint_slice("s", [])
    found["ports"] = [{"name": "grpc", "port": 1}, {"name": "metrics", "port": 2}]
    assert port_of(found, wanted) == number


def test_a_port_of_another_protocol_does_not_count() -> None:
    found = endpoint_slice("s", [])
    found["ports"] = [{"name": "", "port": 1}, {"name": "u", "port": 2, "protocol": "UDP"}]
    assert port_of(found, "") == 1
    found["ports"] = None
    assert port_of(found, "") is None
