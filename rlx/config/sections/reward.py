"""The settings of the reward functions. The functions themselves are in rlx.rewards."""

from __future__ import annotations

import re
from typing import Literal, Self

import pydantic
from pydantic import Field, NonNegativeInt, PositiveInt

from rlx.config.addresses import Address, VariableName
from rlx.config.errors import nearest
from rlx.config.sections.base import NonEmptyText, Pattern, Resources, Seconds, Section

CORRECTNESS = ("task", "exact_match", "numeric", "math_verify", "code", "environment")
"""reward functions that decide whether an answer is correct"""
SCORERS = (*CORRECTNESS, "format", "length", "model", "url", "judge")
"""all reward functions that rlx has; reward.functions also takes module:function"""
MARKS = {"code": ("code_limited",), "judge": ("judge_failed",)}
"""what some of them report beside their scores"""


def late_mark(name: str) -> str:
    """What a function of the user reports beside its scores where a late one scores 0: whether it was late."""
    return f"{name}_late"


class RewardConfig(Section):
    """The functions that score completions, and their parameters."""

    functions: dict[str, float] = Field(default_factory=lambda: {"task": 1.0})
    """reward functions with their weights, e.g. {task: 1, format: 0.2}. task: the scorer of reasoning-gym, or exact
    match for prompt files; exact_match, numeric, math_verify: compare the answer with the expected one; code: runs the
    program in a completion on the tests in the answer column; environment: the rewards of the environment, the default
    with one; format, length, model, url, judge: see the settings
    below; module:function: a function of your own"""
    answer_pattern: Pattern | None = None
    """regular expression whose first group (or full match) is the answer in a completion; the last match counts"""
    format_pattern: Pattern | None = None
    """for format: a completion that matches this regular expression from start to end scores 1, any other 0"""
    length_target: PositiveInt | None = None
    """for length: the score is minus the distance to this many tokens, as a fraction of it, at least -1"""
    model: Address | None = None
    """for model: folder or name of the reward model, a Hugging Face sequence classifier with one label"""
    model_replicas: PositiveInt = 1
    """number of actors that run the reward model"""
    resources_per_model: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """resources that Ray reserves for each of these actors, e.g. {GPU: 0.2}"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that the nodes of these actors must have; see scaling.label_selector"""
    model_batch_tokens: PositiveInt = 16_384
    """maximum number of tokens, padding included, in one forward pass of a reward model"""
    url: Address | None = None
    """for url: http address that takes a JSON batch of completions and returns scores; see
    docs/rewards.md of the repository"""
    url_key_env: VariableName | None = None
    """environment variable that holds the key of that server, sent as a bearer token"""
    url_batch: PositiveInt = 64
    """completions per request"""
    url_retries: NonNegativeInt = 4
    """further attempts when a request to a server or judge fails; the wait doubles after each"""
    timeout_s: Seconds = 60.0
    """longest wait for a reward model, for one request, or for your own function with a batch, before the run fails"""
    on_timeout: Literal["fail", "zero"] = "fail"
    """what a function of your own that takes longer does: end the run, or score 0 for that batch; what a judge that
    does not answer at any attempt does: end the run, or score judge_default"""
    code_score: Literal["all", "share"] = "all"
    """for code: 1 for a program that passes all of its tests, else 0; or the share of tests that it passes"""
    sandbox: Literal["strict", "limits"] = "strict"
    """for code: strict refuses to run programs on a machine that cannot shut files and networks; limits runs them
    there with limits on time and memory alone. The strongest sandbox of the machine is taken in both cases"""
    code_cpu_s: Seconds = 4.0
    """seconds that one test of a program, or all of its unit tests, may compute"""
    code_mean_cpu_s: Seconds = 0.5
    """seconds that the programs of a batch may take on average; once those are used up, each test gets half of this"""
    code_idle_s: Seconds = 0.5
    """seconds in which a program may sleep or wait without computing"""
    code_wall_s: Seconds = 30.0
    """seconds by the clock after which a test ends in any case, also on a busy machine"""
    code_memory_mb: PositiveInt = 1024
    """MiB of memory of a program, all of its processes together"""
    code_processes: PositiveInt = 16
    """processes and threads that a program may have, itself included; without namespaces no other processes"""
    code_disk_mb: PositiveInt = 16
    """MiB that a program may write to its own folder, which is removed after each test"""
    code_open_files: PositiveInt = 64
    """files that a process of a program may have open"""
    code_output_mb: PositiveInt = 1
    """MiB that a program may print"""
    code_parallel: PositiveInt | None = None
    """programs that each worker runs at the same time; unset: twice its share of the machine's processors"""

    judge_url: Address | None = None
    """for judge: address of a server with OpenAI's chat protocol, e.g. http://HOST:8000/v1 of vllm serve"""
    judge_url_key_env: VariableName | None = None
    """environment variable that holds the key of that server, sent as a bearer token"""
    judge_model: NonEmptyText | None = None
    """for judge: name of the model there"""
    judge_mode: Literal["score", "rank"] = "score"
    """score: one request per completion, whose reply has a number; rank: one per prompt, whose reply orders all of its
    completions, the best of which scores 1 and the worst 0"""
    judge_rubric: str | None = None
    """what the judge reads, or a file with it: text with {prompt}, {answer} and {completion}, for rank {completions};
    unset: a general rubric"""
    judge_pattern: Pattern = r"(?i)score[\W_]{0,6}?:(?:[\s*_\[($]|\\boxed\{)*(-?\d+(?:\.\d+)?)"
    """for judge_mode score: regular expression whose first group is the number in a reply; the last match counts"""
    judge_scale: tuple[float, float] = (0.0, 10.0)
    """lowest and highest number of a judge, which become the scores 0 and 1; numbers beyond it count as no reply"""
    judge_default: float = 0.0
    """score of a completion without a readable reply; reward/judge_failed is the share of these"""
    judge_max_tokens: PositiveInt = 512
    """longest reply of a judge, its thinking included; one that is cut has no score"""
    judge_seed: int = 0
    """seed that is sent with each request, and that the order of completions in a ranking follows from"""
    judge_parallel: PositiveInt = 8
    """requests of each worker at the same time"""

    @property
    def reported(self) -> list[str]:
        """The functions, and what they report beside their scores."""
        marks = [mark for name in self.functions for mark in MARKS.get(name, ())]
        late = [late_mark(name) for name in self.functions if ":" in name and self.on_timeout == "zero"]
        return [*self.functions, *marks, *late]

    def part(self, functions: dict[str, float] | None, answer_pattern: str | None) -> RewardConfig:
        """The same for one source of prompts, with what that source has of its own.

        With `code` of its own it takes no pattern of others, which might find the last number of a program.
        """
        own = {"functions": functions, "answer_pattern": answer_pattern}
        given = {name: value for name, value in own.items() if value is not None}
        return self.model_copy(update=own if "code" in (functions or {}) else given)

    @property
    def judging(self) -> str:
        """The name of the function that judges answers: the first of `functions` that can, else `task`."""
        return next((name for name in self.functions if name in CORRECTNESS), "task")

    @pydantic.field_validator("functions")
    @classmethod
    def _check_functions(cls, functions: dict[str, float]) -> dict[str, float]:
        for name in functions:
            if name not in SCORERS and not re.fullmatch(r"[\w.]+:\w+", name):
                expected = f"{', '.join(SCORERS)} or module:function"
                raise ValueError(f"no reward function {name!r}: expected {expected}{nearest(name, SCORERS)}")
        if not functions:
            raise ValueError("at least one reward function is needed; with weight 0 it is only measured")
        return functions

    @pydantic.model_validator(mode="after")
    def _check_function_settings(self) -> Self:
        needs = [("format", "format_pattern"), ("length", "length_target"), ("model", "model"), ("url", "url")]
        for name, key in (*needs, ("judge", "judge_url"), ("judge", "judge_model")):
            if name in self.functions and getattr(self, key) is None:
                raise ValueError(f"reward.functions has {name}, which needs reward.{key}")
            if name not in self.functions and getattr(self, key) is not None:
                raise ValueError(f"reward.{key} is set, but reward.functions gives {name} no weight")
        return self

    @pydantic.field_validator("judge_scale")
    @classmethod
    def _check_scale(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] >= scale[1]:
            raise ValueError("the lowest number must be less than the highest")
        return scale
