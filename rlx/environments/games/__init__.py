"""Games: a number to guess, a small world of rooms, and the games of Gymnasium.

A game is a dialogue; all its chance follows from the seed of `reset`. Imports rlx.types, and gymnasium for its own.
Left out: who plays (rlx.rollout.episodes).

Example:
    from rlx.environments.games.guess_number import GuessNumber
    from rlx.types import TaskRow

    game = GuessNumber(largest=15)
    assert game.reset(TaskRow("", ""), seed=0) == "Guess a number from 1 to 15."
    assert game.step("none") == ("no number", 0.0, False)
"""
