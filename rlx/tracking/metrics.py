"""The name and the meaning of every metric, each stated once. One name means one quantity whatever the settings.

Left out: computing metrics (rlx.training.metrics).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlx.config.errors import ConfigError, nearest
from rlx.config.sections.data import DataConfig, EvalConfig

METRICS = {
    "reward/mean": "mean score of the completions of the step, minus penalties; without episodes whose environment "
    "failed, as the other rewards, task/accuracy, kl/* and policy/entropy",
    "reward/std": "standard deviation of these scores",
    "reward/minus_kl": "mean score minus kl/coef x KL of the responses trained on (algorithm.kl_placement reward)",
    "reward/NAME": "mean of the reward function NAME alone",
    "reward/NAME_late": "share of the completions that NAME, of one's own, was too late for (reward.on_timeout zero)",
    "reward/judge_failed": "share of the completions that the judge gave no readable reply for",
    "reward/code_limited": "share of the completions whose program a limit of the sandbox ended",
    "reward/mean/SOURCE": "reward/mean of the prompts of one of data.sources",
    "source/fraction/SOURCE": "share of the completions trained on whose prompts are of one of data.sources",
    "source/generated/SOURCE": "its share of the completions generated for the step (algorithm.filter_groups)",
    "task/accuracy/SOURCE": "task/accuracy of the prompts of one of data.sources",
    "eval/accuracy/SOURCE": "eval/accuracy of the held-out prompts of one of data.sources",
    "eval/reward/SOURCE": "eval/reward of the held-out prompts of one of data.sources",
    "reward/running_mean": "mean of all scores trained on so far (algorithm.normalize_rewards)",
    "reward/running_std": "standard deviation of all scores trained on so far (algorithm.normalize_rewards)",
    "task/accuracy": "fraction of the completions of the step with a correct answer",
    "groups/varied_fraction": "fraction of the prompts of the step whose completions have different scores, without "
    "episodes whose environment failed",
    "groups/generated": "prompts whose completions were generated for the step (algorithm.filter_groups)",
    "curriculum/passed_over_fraction": "share of the prompts whose turn came that were passed over (data.curriculum)",
    "curriculum/success": "mean estimate of how often a prompt is answered correctly, over the prompts measured so far",
    "curriculum/in_range_fraction": "share of the prompts measured so far whose estimate is in data.curriculum_range",
    "curriculum/measured_fraction": "share of the prompts of training that were measured so far",
    "eval/accuracy": "fraction of held-out prompts answered correctly, greedy decoding",
    "eval/reward": "mean score on held-out prompts, greedy decoding",
    "eval/length": "mean response length on held-out prompts, in tokens",
    "eval/questions": "how many held-out prompts there are, at most eval.num_prompts; generated ones that "
    "are there twice count once",
    "eval/failed_fraction": "fraction of the held-out prompts whose environment failed; their answers count as wrong",
    "eval/ema/accuracy": "eval/accuracy of the averaged weights (train.ema_decay)",
    "eval/ema/reward": "eval/reward of the averaged weights",
    "eval/ema/length": "eval/length of the averaged weights",
    "eval/ema/failed_fraction": "eval/failed_fraction of the averaged weights",
    "eval/SET/avg_at_K": "share of right answers to the questions of one of eval.sets, with K sampled answers to each",
    "eval/SET/pass_at_K": "chance that one of K sampled answers is right (unbiased), mean over the questions",
    "eval/SET/maj_at_K": "share of the questions whose most frequent answer of K is right; a part where several are",
    "eval/SET/reward": "mean score on the questions of one of eval.sets",
    "eval/SET/length": "mean response length on these questions, in tokens",
    "eval/SET/failed_fraction": "fraction of the answers to them whose environment failed; they count as wrong",
    "eval/SET/METRIC_se": "standard error of that metric: how much the choice of these questions and samples moves it",
    "kl/ref": "mean KL(policy || reference) per token in nats, the k3 estimate, before the update",
    "kl/penalty": "mean per token of the KL estimate that is penalised (algorithm.kl_estimator), before the update",
    "kl/coef": "coefficient of that penalty",
    "kl/loss": "mean of that penalty as a loss, over the optimizer steps of the step (algorithm.kl_placement loss)",
    "ptx/loss": "supervised loss per answer token (algorithm.ptx_coef)",
    "policy/loss": "surrogate loss, mean over the optimizer steps of the step",
    "policy/entropy": "mean entropy of the policy per token, in nats; mean -log p unless algorithm.exact_entropy, and "
    "with algorithm.old_logprobs rollout",
    "policy/clip_fraction": "fraction of tokens whose ratio was clipped, over all passes of the step",
    "policy/clip_low_fraction": "fraction of tokens whose ratio was clipped at 1 - clip_low",
    "policy/clip_high_fraction": "fraction of tokens whose ratio was clipped at 1 + clip_high",
    "policy/dual_clip_fraction": "fraction of tokens whose loss the dual clip bounded (algorithm.dual_clip)",
    "policy/left_out_fraction": "fraction of tokens left out of the policy loss (top_entropy_quantile, clip_cov)",
    "policy/approx_kl": "mean KL(old || current) per token during the update",
    "policy/ratio": "mean ratio current / old per token during the update",
    "policy/grad_norm": "mean gradient norm of the policy before clipping, with that of a value head on it",
    "policy/lr": "learning rate of the last optimizer step of the policy; none while the critic warms up",
    "policy/updates": "optimizer steps of the policy in the step",
    "advantage/mean": "mean advantage of the tokens trained on, as the loss takes it: after whitening",
    "advantage/std": "standard deviation of these advantages",
    "return/mean": "mean of what the critic's values are fitted to, per token",
    "return/std": "standard deviation of these returns",
    "value/mean": "mean value that the critic gives a token, before the update",
    "value/std": "standard deviation of these values",
    "value/loss": "clipped value loss, mean over the optimizer steps of the step",
    "value/clip_fraction": "fraction of tokens whose value was clipped",
    "value/grad_norm": "mean gradient norm of the critic before clipping",
    "value/explained_variance": "1 - var(returns - values) / var(returns), before the update",
    "mismatch/kl": "mean k3 of engine and trainer before the update, without a bound (see rollout.logprobs_every)",
    "mismatch/max_abs": "largest difference of the log-probability of a token between engine and trainer",
    "mismatch/clipped_fraction": "fraction of tokens whose importance weight was truncated or masked",
    "mismatch/weight_max": "largest importance weight before truncation",
    "mismatch/effective_fraction": "effective share of the tokens under these weights, (sum w)^2 / (n sum w^2)",
    "episode/turns": "mean turns of the policy in an episode of the step (environment.name)",
    "episode/contexts": "mean contexts of an episode: 1 if the chat template never changes earlier turns",
    "episode/tool_calls": "mean calls of tools in an episode",
    "episode/tool_use_fraction": "fraction of the episodes in which a tool was called",
    "episode/tool_errors": "mean calls of tools in an episode that were malformed, or failed; 0 for an agent with "
    "tools, which alone knows what failed",
    "episode/no_room_fraction": "fraction cut early: what the environment said did not fit in rollout.max_tokens",
    "episode/failed_fraction": "fraction of the episodes whose environment failed: the sum of the next four",
    "episode/hung_fraction": "fraction that ended because a call took longer than environment.timeout_s",
    "episode/raised_fraction": "fraction that ended because the environment raised, or said what cannot be used",
    "episode/died_fraction": "fraction that ended because the environment's process ended or did not answer",
    "episode/unrepeatable_fraction": "fraction that came out differently when repeated: environment.repeat, or a retry",
    "episode/retries": "mean calls in an episode that failed and were answered when made again (environment.retries)",
    "tokens/policy_per_episode": "mean tokens of an episode that the policy drew",
    "tokens/environment_per_episode": "mean tokens of an episode not drawn by the policy, with all that is read again",
    "time/environment": "mean seconds of an episode's calls that its environment answered, not of failed ones or waits",
    "response/length_mean": "mean length of the responses of the step in tokens, those of an environment left out",
    "response/length_min": "length of the shortest response of the step in tokens",
    "response/length_max": "length of the longest response of the step in tokens",
    "response/truncated_fraction": "fraction of responses that reached rollout.max_tokens, of episodes cut or failed",
    "schedule/SETTING": "the number that a setting with a schedule had in the step, e.g. schedule/train.actor_lr",
    "time/rollout": "seconds of waiting for completions",
    "time/generation": "seconds in which the engines generated the completions of the step, also during training",
    "time/scoring": "seconds in which the completions of the step were scored, also while models computed",
    "time/reward": "seconds of waiting for scores",
    "time/logprobs": "seconds of computing log-probabilities and values before the update",
    "time/update": "seconds of forward passes, backward passes and optimizer steps",
    "time/sync": "seconds of sending weights to the engines",
    "time/eval": "seconds of evaluation",
    "time/checkpoint": "seconds for which a checkpoint paused training, part of the step",
    "time/checkpoint_write": "seconds of writing the previous checkpoint, while training continued",
    "time/step": "seconds of the whole step",
    "time/total": "seconds of all steps since the start of the run, without those that a resume did again",
    "tokens/rollout_per_s": "response tokens per second of time/rollout or time/generation, whichever is longer",
    "tokens/update_per_s": "prompt and response tokens trained on per second of time/update",
    "tokens/padding_fraction": "fraction of the positions in the forward passes of the update that are padding",
    "tokens/total": "response tokens generated since the start of the run",
    "staleness/mean": "mean age of the weights that generated the completions, in steps",
    "best/METRIC": "best value of METRIC after any step of training (checkpoint.best_by), or of a sweep's best setting",
    "system/METRIC": "what MLflow's monitors measure on rank 0's machine, mean of a step (tracking.system_metrics)",
    "memory/peak_gib": "largest peak memory of a worker in GiB, of its GPU if it has one",
}


MEASURED = ("time/", "memory/", "system/", "tokens/rollout_per_s", "tokens/update_per_s", "best/", "episode/retries")
"""what the names of metrics begin with that differ between any two runs, or that a run ends with; all others are equal
to the last bit in runs of the same settings on CPUs"""
_OF_SET = re.compile(r"eval/[^/]+/(?:(avg|pass|maj)_at_\d+|(reward|length|failed_fraction))(_se)?")


def meaning(metric: str) -> str | None:
    """What a metric measures; None for an unknown name.

    Every name reward/... is that of a reward function, and a metric's name may be followed by that of a source.
    """
    of_source = f"{metric.rpartition('/')[0]}/SOURCE"
    general = "reward/NAME" if metric.startswith("reward/") else metric
    general = of_source if of_source in METRICS else general
    general = "best/METRIC" if metric.startswith("best/") else general
    general = "schedule/SETTING" if metric.startswith("schedule/") else general
    general = "system/METRIC" if metric.startswith("system/") else general
    return METRICS.get(metric, METRICS.get(general, _of_set(metric)))


def _of_set(metric: str) -> str | None:
    """What a metric of one of eval.sets measures."""
    found = _OF_SET.fullmatch(metric)
    if not found:
        return None
    counted, plain, error = found.groups()
    return METRICS[f"eval/SET/{'METRIC_se' if error else plain or f'{counted}_at_K'}"]


def check_known(best_by: str, evaluated: Sequence[str]) -> None:
    """Raises ConfigError if checkpoint.best_by names no metric; `evaluated`: those that evaluations measure."""
    if best_by not in evaluated and (best_by.startswith("eval/") or meaning(best_by) is None):
        raise ConfigError(
            f"checkpoint.best_by {best_by}: no metric has this name{nearest(best_by, [*evaluated, *METRICS])}"
        )


def evaluated(evaluation: EvalConfig, data: DataConfig, *, averaged: bool) -> list[str]:
    """The metrics that evaluations measure, without standard errors.

    Args:
        averaged: averaged weights are evaluated, too (train.ema_decay).
    """
    plain = ["eval/accuracy", "eval/reward", "eval/length"]
    names = [*plain, *(name.replace("eval/", "eval/ema/") for name in plain if averaged)]
    names += [f"{name}/{label}" for label in data.labels for name in ("eval/accuracy", "eval/reward")]
    return names + [name for each in evaluation.sets for name in each.metrics]


def page() -> str:
    """All metrics with their meanings, as docs/metrics.md has them."""
    rows = "".join(f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n" for name, text in METRICS.items())
    return f"""# Metrics

What each name in MLflow, TensorBoard and W&B means. `NAME` stands for a reward function, `SOURCE` for one of
`data.sources`, `SET` for one of `eval.sets`. `python -m rlx.tracking.metrics` writes this page.

| metric | meaning |
|---|---|
{rows}"""


if __name__ == "__main__":
    print(page(), end="")
