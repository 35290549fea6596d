"""Sources against what they ask: a Kubernetes API and a DNS server on loopback, a file."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import dns.rcode
import pytest

from router.discovery.dns import DnsSource
from router.discovery.file import FileSource
from router.discovery.kubernetes import Api, KubernetesSource
from router.discovery.lookup import Lookup, Wanted
from router.discovery.member import Member, Source
from tests.fakes.dns_server import fake_dns
from tests.fakes.kubernetes import FakeKubernetes, endpoint_slice, pod

A, B = "10.0.0.1:30100", "10.0.0.2:30100"


class Lists:
    """What a source publishes."""

    def __init__(self) -> None:
        self.all: list[list[Member]] = []
        self._changed = asyncio.Event()

    def __call__(self, members: Sequence[Member]) -> None:
        self.all.append(list(members))
        self._changed.set()

    @property
    def addresses(self) -> set[str]:
        """As of now."""
        return {member.address for member in self.all[-1]} if self.all else set()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a list that satisfies `ready`."""
        async with asyncio.timeout(5):
            while not ready():
                self._changed.clear()
                await self._changed.wait()


async def eventually(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not ready():  # noqa: ASYNC110 - another server changes it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(source: Source) -> AsyncGenerator[Lists]:
    lists = Lists()
    task = asyncio.create_task(source.run(lists))
    try:
        yield lists
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


def watching(
    api: FakeKubernetes, *, resync_s: float = 60, service: str = "workers", namespace: str = ""
) -> KubernetesSource:
    wanted = Wanted.service(service, namespace=namespace, port="")
    return KubernetesSource(wanted, api=Api(api.url), resync_s=resync_s, rng=random.Random(1))


async def test_pods_are_listed_and_changes_come_by_the_watch() -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1")]))
        await api.put(endpoint_slice("x1", [pod("u9", "10.0.0.9")], service="others"))
        async with running(watching(api)) as lists:
            await lists.until(lambda: lists.addresses == {A})
            await api.put(endpoint_slice("w2", [pod("u2", "10.0.0.2", ready=False)]))
            await lists.until(lambda: lists.addresses == {A, B})
            await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1", terminating=True)]))
            await lists.until(lambda: any(member.draining for member in lists.all[-1]))
            await api.delete("w1")
            await lists.until(lambda: lists.addresses == {B})
        assert api.lists == 1


async def test_services_are_found_by_labels_and_everywhere() -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("a", [pod("u1", "10.0.0.1")], service="one", app="w"), "east")
        await api.put(endpoint_slice("b", [pod("u2", "10.0.0.2")], service="two", app="w"), "west")
        await api.put(endpoint_slice("c", [pod("u3", "10.0.0.3")], service="two", app="x"), "west")
        for namespace, found in (("*", {A, B}), ("west", {B}), ("", set())):
            wanted = Wanted(selector="app=w", namespace=namespace)
            source = KubernetesSource(wanted, api=Api(api.url), resync_s=60, rng=random.Random(1))
            async with running(source) as lists:
                await lists.until(lambda: bool(lists.all))
                assert lists.addresses == found


async def test_a_long_list_comes_in_pages() -> None:
    async with FakeKubernetes() as api:
        api.page = 2
        for number in range(7):
            await api.put(endpoint_slice(f"w{number}", [pod(f"u{number}", f"10.0.1.{number}")]))
        async with running(watching(api)) as lists:
            await lists.until(lambda: bool(lists.all))
            assert len(lists.addresses) == 7
        assert api.lists == 4


async def test_versions_that_are_forgotten_lead_to_a_new_list() -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1")]))
        async with running(watching(api)) as lists:
            await eventually(lambda: api.watchers == 1)
            api.mute = True
            await api.put(endpoint_slice("w1", [pod("u2", "10.0.0.2")]))
            await api.forget()
            await lists.until(lambda: lists.addresses == {B})
            await eventually(lambda: api.watchers == 1)
        assert api.lists == 2


async def test_a_watch_that_ends_goes_on_where_it_was_bookmarks_included() -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1")]))
        async with running(watching(api)) as lists:
            await eventually(lambda: api.watchers == 1)
            began = api.versions[-1]
            await api.bookmark()
            await api.put(endpoint_slice("x1", [pod("u9", "10.0.0.9")], service="others"))
            await api.bookmark()
            await api.hang_up()
            await eventually(lambda: api.watches == 2)
            await api.put(endpoint_slice("w2", [pod("u2", "10.0.0.2")]))
            await lists.until(lambda: lists.addresses == {A, B})
        assert api.versions == [began, began + 3]
        assert api.lists == 1


async def test_a_watch_that_says_nothing_any_more_is_found_out_by_the_next_list() -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1")]))
        async with running(watching(api, resync_s=0.3)) as lists:
            await eventually(lambda: api.watchers == 1)
            api.mute = True
            await api.delete("w1")
            await api.put(endpoint_slice("w2", [pod("u2", "10.0.0.2")]))
            await lists.until(lambda: lists.addresses == {B})


async def test_while_the_api_is_away_the_last_list_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1")]))
        async with running(watching(api)) as lists:
            await eventually(lambda: api.watchers == 1)
            before = len(lists.all)
            await api.leave()
            await eventually(lambda: "the list stays as it was" in caplog.messages)
            await asyncio.sleep(0.5)  # it asks again and again meanwhile
            assert len(lists.all) == before
            assert caplog.messages.count("the list stays as it was") == 1
            await api.put(endpoint_slice("w2", [pod("u2", "10.0.0.2")]))
            await api.come_back()
            await lists.until(lambda: lists.addresses == {A, B})


async def test_an_api_that_was_never_there_lists_nobody_until_it_comes() -> None:
    async with FakeKubernetes() as api:
        await api.put(endpoint_slice("w1", [pod("u1", "10.0.0.1")]))
        await api.leave()
        async with running(watching(api)) as lists:
            await asyncio.sleep(0.1)
            assert lists.all == []
            await api.come_back()
            await lists.until(lambda: lists.addresses == {A})


async def test_a_storm_of_changes_is_taken_in_few_lists_and_none_is_lost() -> None:
    async with FakeKubernetes() as api, running(watching(api)) as lists:
        await eventually(lambda: api.watchers == 1)
        for number in range(200):
            await api.put(endpoint_slice(f"w{number}", [pod(f"u{number}", f"10.0.1.{number}")]))
        await lists.until(lambda: len(lists.addresses) == 200)
        assert len(lists.all) < 50


async def test_nobody_left_is_a_list_too() -> None:
    async with FakeKubernetes() as api, running(watching(api)) as lists:
        await lists.until(lambda: lists.all == [[]])


def asking(text: str, resolver: object, interval_s: float = 0.02) -> DnsSource:
    return DnsSource(
        Lookup.parse(text),
        interval_s=interval_s,
        rng=random.Random(1),
        resolver=resolver,  # type: ignore[arg-type]
        timeout_s=0.3,
    )


async def test_a_name_lists_its_addresses_again_and_again() -> None:
    async with fake_dns() as (server, resolver):
        server.records["w.test", "A"] = ["10.0.0.1"]
        async with running(asking("w.test:30100", resolver)) as lists:
            await lists.until(lambda: lists.addresses == {A})
            server.records["w.test", "A"] = ["10.0.0.2", "10.0.0.1"]
            await lists.until(lambda: lists.addresses == {A, B})
            server.records["w.test", "A"] = ["10.0.0.2"]
            await lists.until(lambda: lists.addresses == {B})


async def test_addresses_of_the_newer_family_count_where_there_are_no_others() -> None:
    async with fake_dns() as (server, resolver):
        server.records["w.test", "AAAA"] = ["fd00::1"]
        async with running(asking("w.test:30100", resolver)) as lists:
            await lists.until(lambda: lists.addresses == {"[fd00::1]:30100"})
            server.records["w.test", "A"] = ["10.0.0.1"]
            await lists.until(lambda: lists.addresses == {A})


@pytest.mark.parametrize("generous", [False, True])
async def test_service_records_bring_their_ports(generous: bool) -> None:
    async with fake_dns() as (server, resolver):
        server.generous = generous
        server.records["_grpc._tcp.w.test", "SRV"] = ["0 1 7001 a.test.", "0 1 7002 b.test."]
        server.records["a.test", "A"] = ["10.0.0.1"]
        server.records["b.test", "A"] = ["10.0.0.1"]
        async with running(asking("_grpc._tcp.w.test", resolver)) as lists:
            await lists.until(lambda: lists.addresses == {"10.0.0.1:7001", "10.0.0.1:7002"})
        assert (("a.test", "A") in server.questions) is not generous


@pytest.mark.parametrize("how", ["empty", "servfail", "silent"])
async def test_a_bad_answer_keeps_the_last_list(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_dns() as (server, resolver):
        server.records["w.test", "A"] = ["10.0.0.1"]
        async with running(asking("w.test:30100", resolver)) as lists:
            await lists.until(lambda: lists.addresses == {A})
            if how == "empty":
                server.records.clear()
            elif how == "servfail":
                server.rcode = dns.rcode.SERVFAIL
            server.silent = how == "silent"
            await eventually(lambda: "the list stays as it was" in caplog.messages)
            before, asked = len(lists.all), len(server.questions)
            await eventually(lambda: len(server.questions) > asked + 3)
            assert len(lists.all) == before
            assert caplog.messages.count("the list stays as it was") == 1
            server.records["w.test", "A"], server.rcode = ["10.0.0.2"], dns.rcode.NOERROR
            server.silent = False
            await lists.until(lambda: lists.addresses == {B})


async def test_a_name_that_nobody_has_yet_lists_nobody_and_a_dead_server_lists_nothing() -> None:
    async with fake_dns() as (server, resolver):
        async with running(asking("w.test:30100", resolver)) as lists:
            await lists.until(lambda: lists.all[:1] == [[]])
        server.silent = True
        async with running(asking("w.test:30100", resolver)) as lists:
            await eventually(lambda: len(server.questions) > 6)
            assert lists.all == []


async def test_a_file_is_seen_to_change_in_place_and_by_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "members.yaml"
    async with running(FileSource(file, "groups", interval_s=0.01)) as lists:
        await eventually(lambda: "can't be read" in caplog.messages)
        assert lists.all == []
        file.write_text("[h:1]")
        await lists.until(lambda: lists.addresses == {"h:1"})
        file.write_text("[h:2]")
        await lists.until(lambda: lists.addresses == {"h:2"})
        new = tmp_path / "new"
        new.write_text("[h:3]")
        new.replace(file)
        await lists.until(lambda: lists.addresses == {"h:3"})
        file.unlink()
        await eventually(lambda: caplog.messages.count("can't be read") == 2)
        assert lists.addresses == {"h:3"}
        file.write_text("[h:4]")
        await lists.until(lambda: lists.addresses == {"h:4"})
