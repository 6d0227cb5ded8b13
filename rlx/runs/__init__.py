"""TODO rlx.runs."""
