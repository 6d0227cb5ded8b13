"""Prompts: where they come from, how they become token ids, and which rank trains on which of them at which step.

Left out: scores of answers beside a source's own (rlx.rewards) and completions (rlx.rollout).
Imports rlx.config and rlx.types. Reading and tokenizing run in Ray Data.

Example:
    from rlx.config.sections import DataConfig, EvalConfig
    from rlx.data import prompts, sources

    data = DataConfig(source="reasoning_gym:chain_sum")
    training, held_out = sources.training_and_held_out_rows(data, EvalConfig())
    table = prompts.tokenize_rows(training, data, "HuggingFaceTB/SmolLM2-135M-Instruct")
"""
