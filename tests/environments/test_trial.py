"""What is found out of an environment before a run."""

import logging
import os
import time
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.sections.rollout import EnvironmentConfig
from rlx.environments.trial import try_environment
from rlx.types import Prompt, TaskRow

PROMPTS = [Prompt(0, (1,), "2 + 2", "4")]


class Bad:
    """Does what its argument says."""

    def __init__(self, what: str = "") -> None:
        self.what = what

    def reset(self, row: TaskRow, seed: int) -> Any:
        if self.what == "raise":
            raise LookupError("no such row")
        if self.what == "die":
            os._exit(3)
        if self.what == "hungry":
            bytearray(1 << 30)
        if self.what == "mute":
            return []
        return f"{row.question} {time.time() if self.what == 'lie' else seed}"

    def step(self, action: str) -> tuple[str, float, bool]:
        if self.what == "hang":
            time.sleep(60)
        return "so", 0.0, True

    def close(self) -> None:
        time.sleep(60 if self.what == "linger" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"what": "raise"}, "raised LookupError: no such row"),
        ({"what": "mute"}, "reset has returned no messages"),
        ({"what": "die"}, "ended its process"),
        ({"what": "hungry"}, "raised MemoryError at "),
        ({"what": "hang"}, "took longer than 0.3 s"),
        ({"what": "linger"}, "close took longer than 0.3 s"),
        ({"where": 1}, "unexpected keyword argument 'where'"),
    ],
)
def test_an_environment_that_fails_is_refused_before_the_run(params: dict[str, object], reason: str) -> None:
    config = EnvironmentConfig(name="test_trial:Bad", params=params, timeout_s=0.3, memory_mb=256)
    with pytest.raises(ConfigError, match=reason) as raised:
        try_environment(config, PROMPTS)
    assert "\n" not in str(raised.value) and "test_trial:Bad" in str(raised.value)


@pytest.mark.parametrize("needed", [{"label_selector": {"disk": "fast"}}, {"resources_per_actor": {"GPU": 0.5}}])
def test_a_failure_where_environments_run_elsewhere_is_only_shown(
    needed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = EnvironmentConfig(name="test_trial:Bad", params={"what": "raise"}, **needed)
    try_environment(config, PROMPTS)
    (told,) = caplog.messages
    assert told.startswith("on this machine, which need not be like those of the environments: environment.name ")
    assert "test_trial:Bad: raised LookupError: no such row at " in told


def test_a_mistaken_class_is_refused_wherever_environments_run() -> None:
    with pytest.raises(ConfigError, match="has no class Sad"):
        try_environment(EnvironmentConfig(name="test_trial:Sad", label_selector={"disk": "fast"}), PROMPTS)


def test_a_class_that_is_no_environment_is_told_once() -> None:
    with pytest.raises(
        ConfigError, match=r"^environment.name test_trial:Sad: test_trial has no class Sad; nearest: Bad$"
    ):
        try_environment(EnvironmentConfig(name="test_trial:Sad"), PROMPTS)


class Unhinted:
    """Its tool says nothing of the type of its parameter."""

    def price(self, name) -> int:  # type: ignore[no-untyped-def]
        """The price of a thing.

        Args:
            name: of the thing.
        """
        return 1

    def score(self, answer: str) -> float:
        return 1.0


@pytest.mark.slow
def test_a_tool_that_cannot_be_described_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"test_trial:Unhinted: the tool price: .*name is missing a type hint"):
        try_environment(EnvironmentConfig(name="test_trial:Unhinted"), PROMPTS)


def test_one_that_is_not_deterministic_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rlx"):
        try_environment(EnvironmentConfig(name="calculator"), PROMPTS)
        assert not caplog.messages
        try_environment(EnvironmentConfig(name="test_trial:Bad", params={"what": "lie"}), PROMPTS)
    assert "test_trial:Bad says something else when an episode is repeated" in caplog.messages[0]
