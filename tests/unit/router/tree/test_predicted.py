"""What a router guesses that a replica holds, from what it sent there."""

from router.tree.predicted import Predicted

CHAIN = list(range(1, 13))


def test_a_guess_expires() -> None:
    predicted = Predicted(ttl_s=10)
    predicted.learn(CHAIN, 0.0)
    predicted.learn(CHAIN[:5], 8.0)
    assert predicted.depth(CHAIN, 9.0) == 12
    assert predicted.depth(CHAIN, 11.0) == 5
    assert predicted.depth(CHAIN, 18.0) == 0


def test_guesses_are_bounded_and_lose_their_tips_first() -> None:
    predicted = Predicted(limit=20)
    predicted.learn(CHAIN, 0.0)
    predicted.learn(range(100, 112), 1.0)
    assert len(predicted) == 20
    assert predicted.depth(range(100, 112), 1.0) == 12
    assert predicted.depth(CHAIN, 1.0) == 8
