"""The policies that people know from elsewhere, on boards made by hand."""

from collections import Counter
from dataclasses import replace
from random import Random

from router.policy.board import Board
from router.policy.choice import Wish
from router.policy.policies import POLICIES
from tests.unit.router.policy.boards import COLD, board_of, chosen, fleet, prices_of


def test_policies_are_called_as_they_call_themselves() -> None:
    assert {name: policy().name for name, policy in POLICIES.items()} == {
        name: name
        for name in (
            "price",
            "cache_aware",
            "least_load",
            "power_of_two",
            "round_robin",
            "random",
            "consistent_hash",
        )
    }


def test_no_policy_takes_one_that_cannot_be_chosen() -> None:
    board = board_of(replace(COLD, reason="down"), COLD, replace(COLD, waiting=3))
    wish = Wish(prompt_tokens=512, session="s")
    for make in POLICIES.values():
        assert 0 not in chosen(board, make(), [32, 0, 0], wish=wish)


def test_round_robin_takes_turns_and_keeps_its_turn_when_replicas_change() -> None:
    policy, board = POLICIES["round_robin"](), fleet(4)

    def turn(without: int = -1) -> int:
        [rank] = chosen(board, policy, draws=1, without=without)
        return rank

    assert [turn() for _ in range(5)] == [0, 1, 2, 3, 0]
    assert [turn(without=1), turn(), turn(without=0), turn(without=0)] == [2, 3, 1, 2]


def test_random_ignores_prices() -> None:
    shares = chosen(fleet(3), POLICIES["random"](), [32, 0, 0], draws=3000)
    assert min(shares.values()) > 850


def test_least_load_counts_running_and_waiting_and_breaks_ties_by_chance() -> None:
    board = board_of(
        replace(COLD, running=3),
        replace(COLD, running=1, waiting=1),
        replace(COLD, waiting=2),
        replace(COLD, running=2, waiting=9),
    )
    shares = chosen(board, POLICIES["least_load"](), [32, 0, 0, 32], draws=1000)
    assert set(shares) == {1, 2}
    assert min(shares.values()) > 400


def test_power_of_two_takes_the_less_loaded_of_two_drawn() -> None:
    """The least loaded of four is in half of the pairs, the most loaded wins none."""
    board = board_of(*[replace(COLD, running=load) for load in (0, 5, 10, 15)])
    shares = chosen(board, POLICIES["power_of_two"](), draws=6000)
    assert 0.45 < shares[0] / 6000 < 0.55
    assert 0.28 < shares[1] / 6000 < 0.39
    assert shares[3] == 0
    assert chosen(fleet(1), POLICIES["power_of_two"]()) == {0: 200}


def test_the_gate_follows_a_match_above_the_threshold() -> None:
    board = board_of(replace(COLD, running=60), COLD, COLD)
    policy = POLICIES["cache_aware"]()
    assert chosen(board, policy, [10, 0, 0]) == {0: 200}  # 160 of 512 ids: above 0.3
    below = chosen(board, policy, [9, 0, 0])  # 144 ids
    assert set(below) == {1, 2}


def test_the_gate_drops_affinity_when_loads_are_unbalanced_both_ways() -> None:
    policy = POLICIES["cache_aware"]()

    def with_loads(home: int, other: int) -> Counter[int]:
        board = board_of(replace(COLD, running=home), replace(COLD, running=other))
        return chosen(board, policy, [32, 0])

    assert with_loads(65, 0) == {1: 200}
    assert with_loads(64, 0) == {0: 200}  # not above the absolute threshold
    assert with_loads(290, 200) == {0: 200}  # above it, but below 1.5 times
    assert with_loads(301, 200) == {1: 200}


def homes(board: Board, sessions: int) -> dict[str, int]:
    policy, rng = POLICIES["consistent_hash"](), Random(1)
    found = {}
    for number in range(sessions):
        wish = Wish(prompt_tokens=64, session=f"session {number}")
        row = policy.choose(prices_of(board, wish=wish), board.eligible_rows(), wish, rng)
        found[wish.session] = board.names[row][1]
    return found


def test_a_session_stays_where_it_is_whatever_the_load() -> None:
    board = fleet(5)
    before = homes(board, 400)
    assert min(Counter(before.values()).values()) > 50
    busy = board_of(*[replace(COLD, running=9 * rank) for rank in range(5)])
    assert homes(busy, 400) == before


def test_only_the_sessions_of_a_replica_that_goes_move() -> None:
    before = homes(fleet(5), 400)
    left = homes(board_of(COLD, COLD, replace(COLD, reason="down"), COLD, COLD), 400)
    moved = {session for session in before if before[session] != left[session]}
    assert moved == {session for session, home in before.items() if home == 2}
    assert len({left[session] for session in moved}) == 4


def test_only_the_sessions_that_a_new_replica_takes_move() -> None:
    before, after = homes(fleet(5), 400), homes(fleet(6), 400)
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, home in after.items() if home == 5}
    assert 30 < len(moved) < 110


def test_the_order_of_arrival_on_the_board_does_not_matter_to_a_session() -> None:
    board = Board()
    for rank in (3, 0, 4, 2, 1):
        board.add(("g", rank)).set(COLD)
    assert homes(board, 100) == homes(fleet(5), 100)


def test_who_names_no_session_goes_to_the_least_loaded() -> None:
    board = board_of(replace(COLD, running=2), COLD)
    assert chosen(board, POLICIES["consistent_hash"]()) == {1: 200}
