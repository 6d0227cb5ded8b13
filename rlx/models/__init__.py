"""TODO rlx.models."""
