"""TODO rlx.rollout.weight_sync."""
