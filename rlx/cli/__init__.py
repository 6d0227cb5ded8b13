"""TODO rlx.cli."""
