"""TODO rlx.analysis."""
