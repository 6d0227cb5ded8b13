"""TODO rlx.training."""
