"""TODO rlx.algorithms."""
