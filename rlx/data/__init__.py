"""Prompts: where they come from, how they become token ids, and which rank trains on which of them at which step.

Left out: completions (rlx.rollout), and all scores of answers but those of a source's own scorer (rlx.rewards).
Reading and tokenizing run in Ray Data. S3 is opened by storage; generators run in the child processes of rewards.

Imports of rlx: config, rewards, storage, types.

Example:
    from rlx.config.sections.data import DataConfig, EvalConfig
    from rlx.data import prompts, sources

    data = DataConfig(source="reasoning_gym:chain_sum")
    tokenizer = prompts.TokenizerSource.of("HuggingFaceTB/SmolLM2-135M-Instruct")
    training, held_out = sources.training_and_held_out_rows(data, EvalConfig())
    table = prompts.tokenize_rows(training, data, tokenizer)
"""
