"""What tenants may use: rates hold, what was not used comes back, memory is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.tenants import MINUTE_S, Bucket, Rate, Tenants


def test_a_bucket_fills_evenly_up_to_a_minutes_worth() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(600, 0.0)
    assert bucket.wait_s(100, 0.0) == pytest.approx(10.0)
    assert bucket.level(5.0) == pytest.approx(50.0)
    assert bucket.level(1000.0) == 600.0
    assert bucket.wait_s(600, 60.0) == 0.0


def test_a_request_larger_than_a_minute_wants_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = Bucket(600, 0.0)
    assert bucket.wait_s(1800, 0.0) == 0.0
    bucket.take(1800, 0.0)
    assert bucket.level(0.0) == -1200.0
    # Two minutes until there is anything, one more until it is full.
    assert bucket.wait_s(1, 0.0) == pytest.approx(120.1)
    assert bucket.wait_s(1800, 0.0) == pytest.approx(180.0)


def test_what_comes_back_never_fills_more_than_a_bucket() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(500, 0.0)
    bucket.give_back(400, 60.0)
    assert bucket.level(60.0) == 600.0


def test_a_clock_that_stands_or_steps_back_gives_nothing() -> None:
    bucket = Bucket(60, 10.0)
    bucket.take(60, 10.0)
    assert bucket.level(3.0) == 0.0
    bucket.give_back(0, 3.0)
    assert bucket.level(11.0) == pytest.approx(1.0)


# Pause before it, wanted at most, the used part of that in percent, how many later ones end first.
REQUESTS = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 2000), st.integers(0, 100), st.integers(0, 3)),
    max_size=60,
)


@given(st.integers(1, 1000), REQUESTS)
def test_no_interleaving_uses_more_than_the_rate(
    per_minute: int, requests: list[tuple[float, int, int, int]]
) -> None:
    bucket = Bucket(per_minute, 0.0)
    now, used, largest = 0.0, 0.0, 0
    running: list[tuple[int, int]] = []
    for pause, most, percent, ends in requests:
        now += pause
        if bucket.wait_s(most, now) == 0:
            bucket.take(most, now)
            running.append((most, most * percent // 100))
            largest = max(largest, most)
        for _ in range(min(ends, len(running))):
            reserved, real = running.pop()
            bucket.give_back(reserved - real, now)
            used += real
        held = sum(most for most, _ in running)
        allowed = per_minute * (1 + now / MINUTE_S)
        # Beyond the rate only what one large request may owe.
        assert used + held <= allowed + max(0, largest - per_minute) + 1e-3


def test_each_tenant_has_its_own_and_some_another_rate() -> None:
    tenants = Tenants(default=Rate(tokens=10), own={"big": Rate(requests=5), "free": Rate()})
    a, b, big = (tenants.account(name, 0.0) for name in ("a", "b", "big"))
    assert a is not None
    assert b is not None
    assert a is not b
    assert tenants.account("a", 1.0) is a
    assert a.requests is None
    assert big is not None
    assert big.tokens is None
    assert big.requests is not None
    assert big.requests.per_minute == 5
    assert tenants.account("free", 0.0) is None
    assert Tenants().account("a", 0.0) is None


def test_memory_is_bounded_and_nobody_gets_a_fresh_bucket_by_many_names() -> None:
    tenants = Tenants(default=Rate(tokens=60), remembered=3)
    for name in "abc":
        account = tenants.account(name, 0.0)
        assert account is not None
        assert account.tokens is not None
        account.tokens.take(60, 0.0)
    crowd = {id(tenants.account(f"t{number}", 1.0)) for number in range(50)}
    assert len(crowd) == 1
    assert len(tenants) == 3
    # A minute later the accounts are as good as new ones and make room, the idle ones first.
    tenants.account("a", 61.0)
    tenants.account("d", 61.0)
    assert tenants.account("a", 61.0) is not None
    assert len(tenants) == 3
    assert id(tenants.account("d", 61.0)) not in crowd
