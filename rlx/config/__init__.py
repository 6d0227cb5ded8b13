"""TODO rlx.config."""
