"""What a step trained on: its prompts, each with its scores, advantages, ratios and share of the gradient.

It reads what the step kept of its completions, and the shares that a replay has computed. Left out: computing them
(rlx.training.update), and the page of completions (rlx.samples.page).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.config.errors import ConfigError
from rlx.replay.comparing import step_completions
from rlx.samples import gradients, reader
from rlx.samples.reader import KeptCompletion
from rlx.storage.filesystem import Storage


@dataclass(frozen=True)
class StepPrompt:
    """The completions of one prompt in a step, in their order, and what they did to the policy."""

    completions: tuple[KeptCompletion, ...]
    share: float | None  # of the gradient of the policy's loss, see `rlx.training.update`; None: not computed

    @property
    def index(self) -> int:
        """The row of the prompt table."""
        return self.completions[0].prompt_index

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.completions)

    @property
    def mean_score(self) -> float:
        return sum(each.score for each in self.completions) / len(self.completions)

    @property
    def right(self) -> int:
        """How many of its completions are right."""
        return sum(each.correct for each in self.completions)

    @property
    def advantages(self) -> list[float]:
        """The advantages of all its tokens that were trained on."""
        return [value for each in self.completions if each.trained for value in each.own(each.advantages)]

    @property
    def ratios(self) -> list[float]:
        """The ratios of all its tokens that were trained on, in the newest pass over them."""
        return [value for each in self.completions if each.trained for value in each.own(each.ratios)]


def step_prompts(run: Storage, step: int) -> list[StepPrompt]:
    """The prompts of a step, those with the largest share of the gradient first.

    Raises:
        ConfigError: nothing was kept of the step, or a file is damaged.
    """
    table = step_completions(run, step)
    if table is None:
        raise ConfigError(f"no completions of step {step} in {run}")
    groups: dict[int, list[KeptCompletion]] = {}
    for each in reader.completions(table):
        groups.setdefault(each.group, []).append(each)
    shares = gradients.read_shares(run, step) or {}
    prompts = [StepPrompt(tuple(rows), shares.get(group)) for group, rows in groups.items()]
    return sorted(prompts, key=lambda each: -abs(each.share or 0.0))


def prompt_at(prompts: Sequence[StepPrompt], index: int) -> StepPrompt:
    """The prompt in a row of the prompt table.

    Raises:
        ConfigError: the step did not train on it.
    """
    found = next((each for each in prompts if each.index == index), None)
    if found is None:
        known = ", ".join(str(each.index) for each in sorted(prompts, key=lambda each: each.index)[:20])
        raise ConfigError(f"--prompt {index}: the step has the prompts {known}")
    return found
