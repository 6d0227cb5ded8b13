"""TODO rlx.storage."""
