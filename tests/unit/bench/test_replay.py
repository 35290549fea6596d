"""Replays as a whole: the same seed gives the same run, and the figures can be trusted."""

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from bench.replay.job import ReplayError, Scenario, ceiling_tokens
from bench.replay.outcome import Outcome
from bench.replay.rivals import NAMES, chooser
from bench.replay.router import Links
from bench.replay.simulate import Replay, Setup
from bench.replay.workloads import WORKLOADS, make


@cache
def some(name: str, count: int = 300) -> Scenario:
    made = make(name, 1)
    return replace(made, jobs=made.jobs[:count])


def outcome(policy: str, scenario: Scenario, **setup: object) -> Outcome:
    return Replay(scenario, Setup(**setup), chooser(policy)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", NAMES)
def test_everybody_is_served_once_and_hits_stay_below_the_ceiling(policy: str) -> None:
    scenario = some("zipf_prefixes")
    found = outcome(policy, scenario, routers=2)
    assert sorted(id(one.job) for one in found.served) == sorted(id(job) for job in scenario.jobs)
    assert all(one.first_s > 0 and one.computed > 0 for one in found.served)
    asked = sum(job.tokens for job in scenario.jobs)
    assert 0 <= found.hit <= ceiling_tokens(scenario) / asked


@pytest.mark.parametrize("policy", ["price", "sglang", "power_of_two"])
def test_a_seed_decides_everything(policy: str) -> None:
    def times(seed: int) -> list[float]:
        found = outcome(policy, some("scan"), seed=seed, routers=3, links=Links(feed_loss=0.05))
        return [one.first_s for one in found.served]

    assert times(1) == times(1) != times(2)


@pytest.mark.parametrize("name", ["scan", "chat"])
def test_the_trees_of_all_routers_equal_the_caches(name: str) -> None:
    scenario = replace(some(name), cache_tokens=30_000)
    replay = Replay(scenario, Setup(routers=2, replicas=3), chooser("price"))
    replay.run()
    caches = [{key for key, _ in worker.cache.pairs()} for worker in replay.workers]
    assert all(caches)
    assert sum(len(job.keys) for job in scenario.jobs) > 3 * 30_000 // 64  # something was evicted
    for router in replay.routers:
        assert router.proof() == caches


def test_a_lossy_feed_without_repair_ends_in_a_wrong_picture() -> None:
    links = Links(feed_loss=0.2, repair=False)
    replay = Replay(some("scan"), Setup(links=links, replicas=3), chooser("price"))
    replay.run()
    caches = [{key for key, _ in worker.cache.pairs()} for worker in replay.workers]
    assert replay.routers[0].proof() != caches


def test_what_is_predicted_is_found() -> None:
    found = outcome("price", some("chat"))
    assert found.predicted_hit == pytest.approx(found.hit, rel=0.01)
    assert found.hit > 0.2


def test_the_price_beats_chance_by_far() -> None:
    scenario = some("zipf_prefixes", 500)
    ours, chance = outcome("price", scenario), outcome("random", scenario)
    assert ours.hit > chance.hit + 0.1
    assert ours.mean_s < 0.5 * chance.mean_s
    assert ours.quantile_s(0.99) < chance.quantile_s(0.99)


def test_a_burst_of_siblings_computes_what_it_shares_twice_at_most() -> None:
    scenario = some("siblings", 400)
    assert sum(1 for job in scenario.jobs if job.shared) > 100
    for routers in (1, 2):
        assert 1 <= outcome("price", scenario, routers=routers).shared_computed <= routers + 1
    assert outcome("price", scenario).shared_computed <= 2
    assert outcome("random", scenario).shared_computed > 4


def test_four_routers_serve_about_as_well_as_one() -> None:
    def mean_s(routers: int) -> float:
        runs = [outcome("price", some("chat"), routers=routers, seed=seed) for seed in range(1, 5)]
        return fmean(run.mean_s for run in runs)

    assert mean_s(4) < 1.15 * mean_s(1)


def test_a_higher_load_means_longer_waits() -> None:
    means = [outcome("price", some("unique"), load=load).mean_s for load in (0.4, 0.7, 1.0)]
    assert means == sorted(means)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_made_by_its_seed_and_in_order(name: str) -> None:
    first, again, other = make(name, 1), make(name, 1), make(name, 2)
    assert first.jobs == again.jobs != other.jobs
    assert all(one.at <= two.at for one, two in zip(first.jobs, first.jobs[1:], strict=False))
    assert all(0 not in job.keys and len(job.keys) * 64 <= job.tokens for job in first.jobs)
    assert first.name == name


def test_what_makes_no_sense_is_refused() -> None:
    scenario = some("unique")
    with pytest.raises(ReplayError, match="larger than a worker's cache"):
        outcome("price", scenario, cache_tokens=640)
    with pytest.raises(ReplayError, match="no policy is called"):
        chooser("nonsense")
    with pytest.raises(ReplayError, match="no workload is called"):
        make("nonsense", 1)
    with pytest.raises(ReplayError, match="there must be a router"):
        outcome("price", scenario, routers=0)
    with pytest.raises(ReplayError, match="there are no requests"):
        outcome("price", replace(scenario, jobs=[]))
    with pytest.raises(ReplayError, match="over some time"):
        outcome("price", replace(scenario, jobs=scenario.jobs[:1]))
