"""Schedules in the place of numbers: how they are written, what they mean, what is refused."""

from typing import Any

import pytest
from test_config import configured

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections.base import flatten
from rlx.config.sections.schedule import NumberSchedule


def of(**settings: Any) -> RunConfig:
    """A config with these settings; a__b is the setting a.b."""
    return from_tree(with_overrides({}, {key.replace("__", "."): value for key, value in settings.items()}))


@pytest.mark.parametrize(
    ("points", "expected"),
    [  # the values after 0, 1, 199, 200 and 1000 steps, and as many tens of tokens
        ({0: 1, 200: 0.5}, [1, 1, 1, 0.5, 0.5]),
        ({0: "1e0", "2e2": 0.5}, [1, 1, 1, 0.5, 0.5]),
        ({0: 1, 200: 0.5, "interpolate": "linear"}, [1, 0.9975, 0.5025, 0.5, 0.5]),
        ({0: 1, "2000 tokens": 0.5}, [1, 1, 1, 0.5, 0.5]),
        ({"2e3tok": 0.5, 0: 1, "1990 tokens": 7}, [1, 1, 7, 0.5, 0.5]),
        ({0: 3}, [3, 3, 3, 3, 3]),
    ],
)
def test_the_value_of_a_schedule(points: dict[Any, Any], expected: list[float]) -> None:
    schedule = NumberSchedule.of(points)
    assert [schedule.at(step, 10 * step) for step in (0, 1, 199, 200, 1000)] == pytest.approx(expected, abs=1e-12)
    assert NumberSchedule.of(schedule.points) == schedule


@pytest.mark.parametrize(
    ("points", "shown"),
    [
        ({0: 1e-6}, "1e-06"),
        ({0: 1e-6, 20: 1e-7, 30: 0, 40: 1}, "1e-06 -> 1e-07 (after step 20) -> 0 (after step 30) -> 1 (after step 40)"),
        (
            {0: 0, **{n: n for n in range(1, 50)}},
            "0 -> 1 (after step 1) -> 2 (after step 2) -> ... -> 49 (after step 49)",
        ),
        ({0: 1, 9: 0, "interpolate": "linear"}, "1 -> 0 (linear to step 9)"),
        ({0: 1, "9e3 tok": 0, "interpolate": "linear"}, "1 -> 0 (linear to 9,000 tokens)"),
    ],
)
def test_a_schedule_is_shown_in_short(points: dict[Any, Any], shown: str) -> None:
    assert NumberSchedule.of(points).in_short == shown


def test_a_schedule_stands_where_the_number_would() -> None:
    config = configured("--train.actor-lr", "{0: 1e-6, 200: 1e-7}", "--rollout.temperature", "{0: 1, 5 tok: 0.5}")
    assert (config.train.actor_lr, config.rollout.temperature) == (1e-6, 1.0)  # of the first step
    assert list(config.schedules) == ["train.actor_lr", "rollout.temperature"]
    later = config.at(200, 4)
    assert (later.train.actor_lr, later.rollout.temperature) == (1e-7, 1.0)
    assert later.at(3, 5).train.actor_lr == 1e-6 and later.at(3, 5).rollout.temperature == 0.5
    for each in (config, later):  # what is saved is the schedule, whatever the step
        assert from_tree(each.model_dump(mode="json")) == from_tree(each.model_dump(exclude_unset=True)) == config
        assert flatten(each)["train.actor_lr"] == {"0": 1e-6, "200": 1e-7}
    assert with_overrides(config.model_dump(), {"train.actor_lr": 3e-6})["train"]["actor_lr"] == 3e-6


def test_a_reference_is_there_while_the_kl_counts_in_any_step() -> None:
    config = of(algorithm__kl_coef={0: 0, 5: 0.1})
    assert [config.at(step, 0).resolved_reference for step in (0, 5)] == ["copy", "copy"]
    assert of(algorithm__kl_coef={0: 0, 5: 0}).resolved_reference == "none"


@pytest.mark.parametrize("points", [{0: 0.1, 1: 0}, {0: 0, 1: 0.1}, {0: 0, "9 tokens": 1, "interpolate": "linear"}])
def test_a_supervised_loss_may_end_or_begin(points: dict[Any, Any]) -> None:
    assert of(algorithm__ptx_coef=points, data__ptx_source="a.csv").at(1, 0).data.ptx_source == "a.csv"
    for source in ({}, {"data__ptx_source": "a.csv", "algorithm__ptx_coef": {0: 0, 1: 0}}):
        with pytest.raises(ConfigError, match=r"ptx_coef and data\.ptx_source need each other"):
            of(**{"algorithm__ptx_coef": points} | source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train__actor_lr": {5: 1e-6}}, "train.actor_lr = {5: 1e-06}: a schedule begins with the value of step 0"),
        ({"train__actor_lr": {}}, "train.actor_lr = {}: a schedule begins with the value of step 0"),
        ({"train__actor_lr": {0: 1e-6, 5: -1}}, "train.actor_lr = -1.0: input should be greater than or equal to 0"),
        (
            {"train__actor_lr": {0: 1e-6, "x": 1}},
            "a schedule cannot have the place 'x': write steps such as 200, or tokens",
        ),
        ({"train__actor_lr": {"1:1e-4": None}}, "or tokens such as 2e6 tokens; a space after the colon is missing"),
        ({"train__actor_lr": {0: 1e-6, 0.5: 1}}, "a schedule cannot have the place 0.5"),
        ({"train__actor_lr": {0: True}}, "a schedule cannot have the value True"),
        ({"train__actor_lr": {0: "inf"}}, "a schedule cannot have the value 'inf'"),
        ({"train__actor_lr": {0: 1, 5: 2, "5": 3}}, "one value for each place"),
        ({"train__actor_lr": {0: 1, 5: 2, "9tok": 3}}, "places are all steps or all tokens"),
        ({"train__actor_lr": {0: 1, "interpolate": "cubic"}}, "interpolate is cubic"),
        (
            {"algorithm__kl_coef": "{0: 0.1, 200 tokens: 0, interpolate: linear}"},
            "algorithm.kl_coef = '{0: 0.1, 200 tokens: 0, interpolate: linear}': remove the quotes, which make it a",
        ),
        ({"algorithm__kl_coef": "{0: 0.1, 200: 0"}, "algorithm.kl_coef = '{0: 0.1, 200: 0': a bracket is not closed"),
        ({"algorithm__kl_coef": "{0: 0.1, 200: 0]"}, "not valid YAML: line 1, column 16: expected ',' or '}', but got"),
        ({"train__steps": {0: 1, 5: 2}}, "train.steps = {0: 1, 5: 2}: it cannot change during a run; of this section"),
        ({"rollout__top_p": {0: 1, 5: 0.9}}, "rollout.top_p: engines then draw from another distribution"),
        ({"algorithm__kl_coef": {0: 1, 5: 0}, "algorithm__adaptive_kl_target": 1}, "which changes it too"),
        ({"algorithm__entropy_coef": {0: 1, 5: 0}}, "policy/entropy would change from exact to estimated"),
        (
            {"rollout__temperature": {0: 1, "5 tokens": 0.5}, "rollout__max_staleness": 1},
            "rollout.temperature: with rollout.max_staleness and a schedule by tokens it is not known at which step",
        ),
        (
            {
                "rollout__temperature": {0: 1, 5: 0.5},
                "rollout__max_staleness": 1,
                "algorithm__filter_groups": True,
                "algorithm__advantage": "grpo",
            },
            "rollout.temperature: with rollout.max_staleness and algorithm.filter_groups it is not known",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of(**settings)
    assert message in str(refused.value)
