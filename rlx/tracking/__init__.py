"""TODO rlx.tracking."""
