"""TODO rlx.rewards."""
