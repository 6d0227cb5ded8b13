"""Generation beside training: the vLLM actor, the pool of them, and the weights they are sent."""
