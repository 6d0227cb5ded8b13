"""The algorithm's settings, and the table of advantage estimators.

The table states what each estimator needs and which settings its paper combines it with. Left out: the formulas, which
are in rlx.algorithms. A new estimator is a name and a row here, and a function and a row in rlx.algorithms.advantages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlx.config.sections.base import Fraction
from rlx.config.sections.schedule import ScheduledSection

AdvantageName = Literal["gae", "grpo", "dapo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++_baseline", "remax"]
KLPlacement = Literal["reward", "loss"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
FilterBy = Literal["reward", "correct"]


@dataclass(frozen=True)
class Estimator:
    """The defaults that algorithm settings take with an advantage estimator, and what the estimator needs."""

    kl_placement: KLPlacement
    kl_estimator: KLEstimator
    aggregation: Aggregation
    whiten_advantages: bool = False
    needs_critic: bool = False
    needs_groups: bool = False
    """compares the completions of a prompt with one another"""
    needs_greedy: bool = False
    """compares a completion with the greedy completion of its prompt"""
    kl_coef: float = 0.005
    clips: tuple[float, float] = (0.2, 0.2)
    """clip_low and clip_high of policy_loss ppo"""
    filter_groups: bool = False
    filter_by: FilterBy = "reward"
    overlong_penalty: float = 1.0
    overlong_share: int = 0
    """the soft overlong penalty rises over 1 / so many of rollout.max_tokens; 0: there is none"""

    @property
    def baseline(self) -> str:
        """What the estimator compares a completion with, in words."""
        if self.needs_critic:
            return "a critic"
        if self.needs_groups:
            return "the other completions of the prompt"
        return "the greedy completion of the prompt" if self.needs_greedy else "the batch"


ESTIMATORS: dict[AdvantageName, Estimator] = {
    # Schulman et al. 2015 (arXiv 1506.02438); KL and loss as in Ziegler et al. 2019 (arXiv 1909.08593)
    "gae": Estimator("reward", "k1", "token_mean", whiten_advantages=True, needs_critic=True),
    # Shao et al. 2024, DeepSeekMath (arXiv 2402.03300)
    "grpo": Estimator("loss", "k3", "sequence_mean", needs_groups=True),
    # Yu et al. 2025 (arXiv 2503.14476): no KL, a penalty over the last 4096 of 20480 tokens
    "dapo": Estimator(
        "loss",
        "k3",
        "token_mean",
        needs_groups=True,
        kl_coef=0.0,
        clips=(0.2, 0.28),
        filter_groups=True,
        filter_by="correct",
        overlong_penalty=0.5,
        overlong_share=5,
    ),
    # Liu et al. 2025 (arXiv 2503.20783), without KL
    "dr_grpo": Estimator("loss", "k3", "constant", needs_groups=True, kl_coef=0.0),
    # Ahmadian et al. 2024 (arXiv 2402.14740)
    "rloo": Estimator("reward", "k1", "constant", needs_groups=True),
    # Hao et al. 2025 (arXiv 2505.23585), without KL; the paper trains on policy
    "opo": Estimator("loss", "k3", "token_mean", needs_groups=True, kl_coef=0.0),
    # Hu et al. 2025 (arXiv 2501.03262), both variants
    "reinforce++": Estimator("reward", "k1", "token_mean", whiten_advantages=True),
    "reinforce++_baseline": Estimator("loss", "k2", "token_mean", whiten_advantages=True, needs_groups=True),
    # Li et al. 2023 (arXiv 2310.10505)
    "remax": Estimator("reward", "k1", "constant", needs_greedy=True),
}
GROUPED = tuple(name for name, estimator in ESTIMATORS.items() if estimator.needs_groups)
"""estimators that need at least two completions of each prompt"""
_CLIPS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
"""as in the papers of these losses, whatever the estimator"""
_AGGREGATIONS: dict[str, Aggregation] = {"gspo": "sequence_mean", "cispo": "token_mean", "sapo": "sequence_mean"}
_ALONE = {
    "sapo_temperature_pos": "sapo",
    "sapo_temperature_neg": "sapo",
    "clip_cov_ratio": "clip_cov",
    "clip_cov_low": "clip_cov",
    "clip_cov_high": "clip_cov",
}
"""settings of one policy loss"""


def _default_estimator(given: dict[str, Any]) -> Estimator:
    """The estimator whose paper gives the defaults; that of gae when the chosen name is invalid."""
    return ESTIMATORS[given.get("advantage", "gae")]


def _default_aggregation(given: dict[str, Any]) -> Aggregation:
    return _AGGREGATIONS.get(given.get("policy_loss", "ppo"), _default_estimator(given).aggregation)


def _default_clips(given: dict[str, Any]) -> tuple[float, float]:
    return _CLIPS.get(given.get("policy_loss", "ppo"), _default_estimator(given).clips)


def _default_kl_estimator(given: dict[str, Any]) -> KLEstimator:
    published = _default_estimator(given).kl_estimator
    # The gradient of k1 in the loss is zero on average.
    return "k3" if published == "k1" and given.get("kl_placement") == "loss" else published


def _baselines() -> str:
    """The baseline of each estimator, for --help."""
    names: dict[str, list[str]] = {}
    for name, estimator in ESTIMATORS.items():
        names.setdefault(estimator.baseline, []).append(name)
    return "; ".join(f"{', '.join(group)}: {baseline}" for baseline, group in names.items())


class AlgorithmConfig(ScheduledSection):
    """Advantages, losses, the KL to the reference model, and the correction of engine log-probabilities."""

    CHANGING: ClassVar[tuple[str, ...]] = (
        *("gamma", "gae_lambda", "kl_coef", "clip_low", "clip_high", "dual_clip", "entropy_coef", "value_clip"),
        *("value_coef", "reward_clip", "missing_eos_penalty", "overlong_penalty", "target_kl", "ptx_coef"),
        *("rollout_correction_low", "rollout_correction_high", "top_entropy_quantile", "clip_cov_ratio"),
    )

    advantage: AdvantageName = Field(default="gae", description=f"baseline of the advantage. {_baselines()}")
    policy_loss: Literal["ppo", "gspo", "cispo", "sapo", "clip_cov"] = "ppo"
    """ppo: clip the probability ratio of each token; gspo: clip the ratio of each response; cispo: weight each token's
    log-probability with its clipped ratio; sapo: fade tokens out by a sigmoid of the ratio instead of clipping;
    clip_cov: ppo without a few tokens, drawn from those whose log-probability and advantage vary together most"""
    aggregation: Aggregation = Field(default_factory=_default_aggregation)
    """mean of the loss. token_mean: over the tokens of the global batch; sequence_mean: over the tokens of each
    response, then over responses; constant: sum over each response / rollout.max_tokens, mean over responses; unset: as
    in the paper of algorithm.advantage, but sequence_mean with gspo and sapo, token_mean with cispo"""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """discount per token; 0: each token has its own reward alone, as in on-policy distillation"""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """lambda of generalized advantage estimation; the default is veRL's and OpenRLHF's: a score at the end of a long
    response reaches its first tokens only with a lambda near 1, or with a critic that has learnt"""
    kl_coef: NonNegativeFloat = Field(default_factory=lambda given: _default_estimator(given).kl_coef)
    """weight of the KL to the reference model; unset: 0.005, but 0 with dapo, dr_grpo and opo, as in their papers"""
    kl_placement: KLPlacement = Field(default_factory=lambda given: _default_estimator(given).kl_placement)
    """reward: subtract the KL from the reward of each token; loss: add it to the loss; unset: as in the paper of
    algorithm.advantage"""
    kl_estimator: KLEstimator = Field(default_factory=_default_kl_estimator)
    """estimator of that KL; k3 is at most 10 per token. With +: the value of the named estimator with the unbiased
    gradient of k2 (straight-through), weighted by the ratio current / old; unset: as in the paper of
    algorithm.advantage, k3 if that estimator has no useful gradient in the loss"""
    adaptive_kl_target: PositiveFloat | None = None
    """KL per token, as kl/ref measures it, that kl_coef is adapted to reach; unset: kl_coef is constant"""
    adaptive_kl_horizon: PositiveInt = 10_000
    """number of completions over which kl_coef adapts"""
    clip_low: Fraction = Field(default_factory=lambda given: _default_clips(given)[0])
    """the probability ratio is clipped below 1 - clip_low; unset: 0.2, with gspo 0.0003, with cispo 1"""
    clip_high: PositiveFloat = Field(default_factory=lambda given: _default_clips(given)[1])
    """the probability ratio is clipped above 1 + clip_high; unset: 0.2, dapo 0.28, gspo 0.0004, cispo 4"""
    dual_clip: float | None = Field(default=None, gt=1)
    """dual-clip PPO: the loss of a token with a negative advantage is at most this multiple of -advantage"""
    sapo_temperature_pos: PositiveFloat = 1.0
    """sapo: how fast tokens with a positive advantage fade out as the ratio leaves 1; the paper's value"""
    sapo_temperature_neg: PositiveFloat = 1.05
    """sapo: the same for the other tokens; the paper's value"""
    clip_cov_ratio: Fraction = 2e-4
    """clip_cov: share of a mini-batch's tokens that is left out of the policy loss; the paper's value"""
    clip_cov_low: float = 1.0
    """clip_cov: least covariance of tokens that may be left out; the paper's value"""
    clip_cov_high: float = 5.0
    """clip_cov: largest covariance of tokens that may be left out; the paper's value"""
    top_entropy_quantile: Fraction = 1.0
    """only this share of a step's tokens, those where the policy before the update has the highest entropy, is in the
    policy loss, e.g. 0.2 as in Wang et al. 2025; needs exact_entropy; 1: all tokens"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus in the loss"""
    exact_entropy: bool = False
    """compute policy/entropy from the probabilities of all tokens, as an entropy bonus does: it takes as long as the
    log-probabilities; otherwise, and with old_logprobs rollout, it is the mean of -log p of the sampled tokens,
    which top_p, top_k and stale completions bias"""
    value_clip: PositiveFloat | None = 0.2
    """clip the value loss where a prediction moves further than this from its old value; unset: no clipping"""
    value_coef: PositiveFloat = 0.5
    """weight of the value loss in the policy's loss when the critic is a head"""
    whiten_advantages: bool = Field(default_factory=lambda given: _default_estimator(given).whiten_advantages)
    """scale advantages to mean 0 and variance 1 over the global batch; unset: as in the paper of algorithm.advantage"""
    reward_clip: PositiveFloat | None = None
    """clip the reward of each completion to [-reward_clip, reward_clip]"""
    normalize_rewards: bool = False
    """subtract the running mean of all rewards trained on so far and divide by their standard deviation, before
    clipping"""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """subtracted from the reward of a response that reaches rollout.max_tokens without ending, or of an episode that
    reaches environment.max_turns"""
    overlong_buffer: NonNegativeInt | None = None
    """number of tokens before rollout.max_tokens over which the soft overlong penalty rises from 0; 0: no penalty;
    unset: a fifth of rollout.max_tokens with dapo, otherwise 0"""
    overlong_penalty: PositiveFloat = Field(default_factory=lambda given: _default_estimator(given).overlong_penalty)
    """soft overlong penalty at rollout.max_tokens, subtracted from the reward; unset: 1, dapo 0.5, half of what lies
    between a wrong answer (0) and a right one (1), as in its paper, where these score -1 and 1 and the penalty is 1"""
    mask_truncated: bool = False
    """leave responses that reach rollout.max_tokens without ending, and episodes that reach environment.max_turns, out
    of the losses; their rewards still count where completions of a prompt are compared (overlong filtering)"""
    filter_groups: bool = Field(default_factory=lambda given: _default_estimator(given).filter_groups)
    """replace prompts whose completions are all alike by new ones (DAPO's dynamic sampling); unset: true with dapo"""
    filter_by: FilterBy = Field(default_factory=lambda given: _default_estimator(given).filter_by)
    """what completions of such prompts have in common. reward: the same reward, penalties included; correct: all are
    right or all are wrong, whatever their rewards; unset: correct with dapo, but reward with an environment that judges
    the answers; otherwise reward"""
    filter_rounds: PositiveInt = 8
    """maximum number of rounds of generation per step, the first included; if prompts are still missing after the last
    round, the step also trains on prompts that were to be replaced"""
    target_kl: PositiveFloat | None = None
    """end a step's epochs, the critic's too, when a mini-batch's mean KL(old || current) exceeds this"""
    ptx_coef: NonNegativeFloat = 0.0
    """weight of the supervised loss on data.ptx_source, per answer token"""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """denominator of the PPO ratio. recomputed: log-probabilities from the trainer before the update; rollout: those of
    the engine, which saves a forward pass"""
    rollout_correction: Literal["auto", "none", "tis", "mask"] = "auto"
    """correction for the difference between the engine's policy and the trainer's policy before the update, by their
    probability ratio. tis: truncate the ratio; mask: leave out tokens with an extreme ratio; auto: tis with
    rollout.max_staleness unless old_logprobs is rollout, otherwise none"""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """compute that ratio for each token or for each response"""
    rollout_correction_low: float = Field(default=0.5, ge=0, lt=1)
    """mask: tokens (or responses) with a smaller ratio are left out"""
    rollout_correction_high: float = Field(default=2.0, gt=1)
    """tis: larger ratios are set to this; mask: tokens (or responses) with a larger ratio are left out"""

    def most_completions(self, samples: int) -> int:
        """The most completions that a step generates for each of its prompts, of which it trains on so many samples."""
        return (samples + self.estimator.needs_greedy) * (self.filter_rounds if self.filter_groups else 1)

    def overlong_tokens(self, max_tokens: int) -> int:
        """`overlong_buffer`, or its default for responses of at most so many tokens."""
        if self.overlong_buffer is not None:
            return self.overlong_buffer
        share = self.estimator.overlong_share
        return max_tokens // share if share else 0

    @property
    def chooses_tokens(self) -> bool:
        """Whether the policy before the update decides which tokens the policy loss has."""
        return self.policy_loss == "clip_cov" or self.top_entropy_quantile < 1

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy of the policy is computed, not estimated."""
        return self.exact_entropy or self.entropy_coef > 0

    @property
    def estimator(self) -> Estimator:
        """What the chosen advantage estimator needs, e.g. `config.algorithm.estimator.needs_critic`."""
        return ESTIMATORS[self.advantage]

    @pydantic.model_validator(mode="after")
    def _check_policy_loss(self) -> Self:
        for key, loss in _ALONE.items():
            if self.policy_loss != loss and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"algorithm.{key} does nothing without algorithm.policy_loss {loss}")
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError("algorithm.clip_cov_low must be less than algorithm.clip_cov_high")
        if self.top_entropy_quantile < 1 and not (self.needs_entropy and self.old_logprobs == "recomputed"):
            raise ValueError(
                "algorithm.top_entropy_quantile needs the entropy before the update: set algorithm.exact_entropy, and "
                "leave algorithm.old_logprobs at recomputed"
            )
        return self
