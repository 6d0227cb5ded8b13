"""The name and the meaning of every metric, each stated once. One name means one quantity whatever the settings.

Left out: computing metrics (rlx.training.metrics).
"""

from __future__ import annotations

METRICS = {
    "reward/mean": "mean score of the completions of the step, minus penalties",
    "reward/std": "standard deviation of these scores",
    "reward/NAME": "mean of the reward function NAME alone",
    "reward/running_mean": "mean of all scores trained on so far (algorithm.normalize_rewards)",
    "reward/running_std": "standard deviation of all scores trained on so far (algorithm.normalize_rewards)",
    "task/accuracy": "fraction of the completions of the step with a correct answer",
    "groups/varied_fraction": "fraction of the prompts of the step whose completions have different scores",
    "groups/generated": "prompts whose completions were generated for the step (algorithm.filter_groups)",
    "eval/accuracy": "fraction of held-out prompts answered correctly, greedy decoding",
    "eval/reward": "mean score on held-out prompts, greedy decoding",
    "eval/length": "mean response length on held-out prompts, in tokens",
    "eval/ema/accuracy": "eval/accuracy of the averaged weights (train.ema_decay)",
    "eval/ema/reward": "eval/reward of the averaged weights",
    "eval/ema/length": "eval/length of the averaged weights",
    "kl/ref": "mean KL estimate per token to the reference model, before the update",
    "kl/coef": "coefficient of that KL",
    "kl/loss": "mean of that KL as a loss, over the optimizer steps of the step (algorithm.kl_placement loss)",
    "ptx/loss": "supervised loss per answer token (algorithm.ptx_coef)",
    "policy/loss": "surrogate loss, mean over the optimizer steps of the step",
    "policy/entropy": "mean entropy of the policy per token, in nats; mean -log p unless algorithm.exact_entropy",
    "policy/clip_fraction": "fraction of tokens whose ratio was clipped",
    "policy/approx_kl": "mean KL(old || current) per token during the update",
    "policy/ratio": "mean ratio current / old per token during the update",
    "policy/grad_norm": "mean gradient norm of the policy before clipping",
    "policy/lr": "learning rate of the policy after the step",
    "policy/updates": "optimizer steps of the policy in the step",
    "value/loss": "clipped value loss, mean over the optimizer steps of the step",
    "value/clip_fraction": "fraction of tokens whose value was clipped",
    "value/grad_norm": "mean gradient norm of the critic before clipping",
    "value/explained_variance": "1 - var(returns - values) / var(returns), before the update",
    "mismatch/kl": "mean KL estimate (k3) between engine and trainer before the update (see rollout.logprobs_every)",
    "mismatch/max_abs": "largest difference of the log-probability of a token between engine and trainer",
    "mismatch/clipped_fraction": "fraction of tokens whose importance weight was truncated or masked",
    "mismatch/weight_max": "largest importance weight before truncation",
    "mismatch/effective_fraction": "effective share of the tokens under these weights, (sum w)^2 / (n sum w^2)",
    "response/length_mean": "mean response length in tokens",
    "response/truncated_fraction": "fraction of responses that reached rollout.max_tokens",
    "time/rollout": "seconds of waiting for completions",
    "time/generation": "seconds in which the engines generated the completions of the step, also during training",
    "time/reward": "seconds of scoring",
    "time/logprobs": "seconds of computing log-probabilities and values before the update",
    "time/update": "seconds of forward passes, backward passes and optimizer steps",
    "time/sync": "seconds of sending weights to the engines",
    "time/eval": "seconds of evaluation",
    "time/checkpoint": "seconds for which a checkpoint paused training",
    "time/checkpoint_write": "seconds of writing the previous checkpoint, while training continued",
    "time/step": "seconds of the whole step",
    "tokens/rollout_per_s": "response tokens per second of time/rollout, or of time/generation if prefetched",
    "tokens/update_per_s": "prompt and response tokens trained on per second of time/update",
    "tokens/padding_fraction": "fraction of the positions in the forward passes of the update that are padding",
    "tokens/total": "response tokens generated since the start of the run",
    "staleness/mean": "mean age of the weights that generated the completions, in steps",
    "best/METRIC": "best value of METRIC after any step of training (checkpoint.best_by), or of a sweep's best setting",
    "system/METRIC": "what MLflow's monitors measure on rank 0's machine, mean of a step (tracking.system_metrics)",
    "memory/peak_gib": "largest peak memory of a worker in GiB, of its GPU if it has one",
}


def meaning(metric: str) -> str | None:
    """What a metric measures; None for an unknown name. Every name reward/... is that of a reward function."""
    general = "reward/NAME" if metric.startswith("reward/") else metric
    general = "best/METRIC" if metric.startswith("best/") else general
    general = "system/METRIC" if metric.startswith("system/") else general
    return METRICS.get(metric, METRICS.get(general))
