"""TODO rlx.sweeps."""
