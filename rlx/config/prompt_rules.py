"""The rules between settings of prompts: sources and their rewards, columns, the curriculum, held-out sets.

Left out: rules between other settings (rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.config.errors import nearest
from rlx.config.rules import refuse_if
from rlx.config.sections.algorithm import AlgorithmConfig
from rlx.config.sections.data import DEFAULT_SOURCE, GENERATED, DataConfig, EvalConfig, template_parts
from rlx.config.sections.reward import CORRECTNESS, RewardConfig
from rlx.config.sections.rollout import RolloutConfig

_UNJUDGED = (
    f"measures right answers: name one of {', '.join(CORRECTNESS)} in reward.functions, with weight 0 if it is no "
    f"reward"
)


def check_sources(data: DataConfig, evaluation: EvalConfig, reward: RewardConfig) -> None:
    """Raises ValueError if data.sources contradict data.source or one another, or reward with what is not there."""
    if not data.sources:
        return
    labels = data.labels
    refuse_if(data.source != DEFAULT_SOURCE, "data.source does nothing with data.sources: name it there")
    refuse_if(evaluation.source, "eval.source does nothing with data.sources: name held_out of each source there")
    for label in labels:
        refuse_if(labels.count(label) > 1, f"data.sources: two are called {label}: give each a name of its own")
    refuse_if(
        data.params and not any(each.takes_params for each in data.sources),
        f"data.params does nothing: no {GENERATED}DATASET of data.sources is without params of its own: set it to {{}}",
    )
    for each in data.sources:
        check_weights(f"data.sources {each.label}", each.reward, list(reward.functions))


def check_weights(where: str, weights: Mapping[str, float] | None, known: Sequence[str]) -> None:
    """Raises ValueError if some prompts' own weights of reward functions name an unknown one, or are all 0."""
    for name in weights or {}:
        refuse_if(
            name not in known,
            f"{where}: reward.functions has no {name!r}{nearest(name, known)}; name it there, with weight 0 if other "
            f"prompts do not use it",
        )
    refuse_if(
        weights is not None and not any(weights.values()),
        f"{where}: at least one reward function must have a weight other than 0",
    )


def check_reward_use(data: DataConfig, evaluation: EvalConfig, reward: RewardConfig) -> None:
    """Raises ValueError if a reward function scores no prompts, or a setting is for a function that is not there."""
    own = [*data.sources, *(each for each in evaluation.sets if each.source or each.reward)]
    if data.sources and all(each.reward for each in own):
        used = {name for each in own for name in each.reward or {}}
        for name in reward.functions:
            refuse_if(
                name not in used,
                f"reward.functions has {name}, which scores nothing: every one of data.sources has a reward of its own "
                f"without it; name it there or leave it out",
            )
    for key, field in RewardConfig.model_fields.items():
        refuse_if(
            key.startswith("code_") and getattr(reward, key) != field.default and "code" not in reward.functions,
            f"reward.{key} does nothing without code in reward.functions",
        )
    refuse_if(
        reward.on_timeout != "fail" and not any(name == "judge" or ":" in name for name in reward.functions),
        "reward.on_timeout does nothing without judge or a function of your own in reward.functions",
    )


def check_ranking(rewards: Sequence[RewardConfig], algorithm: AlgorithmConfig, samples: int) -> None:
    """Raises ValueError if a judge has nothing to compare a completion with.

    Args:
        rewards: those of each source.
        samples: train.samples_per_prompt.
    """
    ranks = any("judge" in each.functions and each.judge_mode == "rank" for each in rewards)
    refuse_if(
        ranks and samples + algorithm.estimator.needs_greedy < 2,
        "reward.judge_mode rank compares the completions of a prompt, and train.samples_per_prompt is 1: set it to 2 "
        "or more, or reward.judge_mode to score",
    )


def check_curriculum(data: DataConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raises ValueError if a curriculum cannot know in time how difficult prompts are."""
    if data.curriculum == "none":
        return
    refuse_if(
        rollout.max_staleness,
        "data.curriculum does not work with rollout.max_staleness: the prompts of a step follow from the scores of the "
        "step before, which are not known yet when a step is generated ahead",
    )
    refuse_if(
        algorithm.filter_groups,
        "data.curriculum does not work with algorithm.filter_groups: both choose prompts by their scores: set only one "
        "of them",
    )


def check_correctness(data: DataConfig, algorithm: AlgorithmConfig, rewards: Sequence[RewardConfig]) -> None:
    """Raises ValueError if right answers choose the prompts and a source has no reward that judges answers.

    Args:
        rewards: those of each source.
    """
    by_correct = algorithm.filter_groups and algorithm.filter_by == "correct"
    is_judged = all(set(reward.functions) & set(CORRECTNESS) for reward in rewards)
    refuse_if(data.curriculum != "none" and not is_judged, f"data.curriculum {_UNJUDGED}")
    refuse_if(
        by_correct and not is_judged,
        f"algorithm.filter_by correct, the default of dapo, {_UNJUDGED}, or set algorithm.filter_by to reward",
    )


def check_parts(data: DataConfig, evaluation: EvalConfig) -> None:
    """Raises ValueError as `check_prompts`, or if training and held-out prompts share seeds; it names the source."""
    for number, part in enumerate(data.parts):
        try:
            check_prompts(part, own := evaluation.part(data, number))
            refuse_if(
                part.source.startswith(GENERATED) and share_seeds(part, own),
                f"eval.seed ({own.seed}) is too close to data.seed ({part.seed}): generated training and held-out "
                f"prompts would share seeds",
            )
        except ValueError as error:
            raise ValueError(f"data.sources {data.labels[number]}: {error}" if data.sources else str(error)) from None


def check_prompts(data: DataConfig, evaluation: EvalConfig) -> None:
    """Raises ValueError if a setting is for another kind of prompts."""
    generated = data.source.startswith(GENERATED)
    refuse_if(
        not generated and data.params,
        f"data.params are for {GENERATED}DATASET: with data.source {data.source} set them to {{}}",
    )
    asked = {column for _, column in template_parts(data.prompt_template or "") if column}
    refuse_if(
        not generated and not asked and data.prompt_column == data.answer_column,
        f"data.prompt_column and data.answer_column are both {data.prompt_column!r}",
    )
    refuse_if(
        asked and data.prompt_column != type(data).model_fields["prompt_column"].default,
        "data.prompt_column does nothing with data.prompt_template, which names its columns itself",
    )
    refuse_if(
        generated and (asked - {"question"} or data.system_column),
        f"data.prompt_template and data.system_column: {GENERATED}DATASET has no column but question",
    )
    refuse_if(
        generated and data.expected_pattern,
        f"data.expected_pattern: {GENERATED}DATASET has answers that need none",
    )
    refuse_if(
        generated and evaluation.source is not None,
        "eval.source, or held_out of a source, is for prompt files: generated held-out prompts come from their source",
    )


def share_seeds(data: DataConfig, evaluation: EvalConfig) -> bool:
    """Whether generated training prompts and others that are evaluated on would share seeds."""
    return data.seed < evaluation.seed + evaluation.num_prompts and evaluation.seed < data.seed + data.num_prompts


def check_sets(evaluation: EvalConfig, data: DataConfig, reward: RewardConfig) -> None:
    """Raises ValueError if one of eval.sets needs more held-out prompts than there are, or does not fit its source."""
    for each in evaluation.sets:
        where, count = f"eval.sets {each.name}", each.num_prompts
        check_weights(where, each.reward, list(reward.functions))
        if count and not each.source and (data.sources or count > evaluation.num_prompts):
            raise ValueError(
                f"{where}: without a source it has the eval.num_prompts ({evaluation.num_prompts}) held-out prompts: "
                f"name a source, or leave num_prompts out"
            )
        try:
            if each.source:
                check_prompts(each.prompts(data), evaluation.of(each))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
