"""TODO rlx.data."""
