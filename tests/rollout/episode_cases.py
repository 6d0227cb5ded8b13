"""Tokenizers and environments for tests of episodes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlx.environments.host import Host, HostSettings
from rlx.environments.pool import EnvironmentPool, LocalHost
from rlx.rollout.base import Output, Request
from rlx.types import TaskRow

CHATML = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETTING = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""takes thoughts out of all turns of the assistant"""
ROLES = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|tools|>")


def byte_tokenizer(template: str, special: Sequence[str] = ROLES, texts: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, and of what is frequent in some texts; the first special token ends turns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + len(special) + (300 if texts else 0)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], chat_template=template)


def pool_of(name: str, hosts: Sequence[Host] | None = None, retries: int = 1, **settings: Any) -> EnvironmentPool:
    """A rank's environments in this process; what it is told is in `told`."""
    own = HostSettings(name, settings.pop("params", {}), settings.pop("timeout_s", 5.0), 8)
    told: list[str] = []
    pool = EnvironmentPool(hosts or [LocalHost(own)], "run/0/", retries=retries, concurrency=8, notify=told.append)
    pool.told = told  # type: ignore[attr-defined]
    return pool


def saying(tokenizer: Any, turn: Callable[[Request], str], stop: bool = True) -> Callable[[Request], Output]:
    """An engine that says these texts; the i-th token of a turn has log-probability -(i + 1)."""

    def answer(request: Request) -> Output:
        ids = [*tokenizer(turn(request), add_special_tokens=False).input_ids, *([tokenizer.eos_token_id] * stop)]
        cut = ids[: request.sampling.max_tokens]
        logprobs = tuple(-float(number + 1) for number in range(len(cut))) if request.sampling.logprobs else ()
        return Output(tuple(cut), logprobs, cut == ids)

    return answer


class Counting:
    """Says the number of the turn; ends after the word "stop", with the reward of how many turns there were."""

    def __init__(self, start: str = "go") -> None:
        self.start, self.turns = start, 0

    def reset(self, row: TaskRow, seed: int) -> str:
        return f"{self.start} {row.question}"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"turn {self.turns}", 0.5 * self.turns, "stop" in action


class ByTool:
    """Adds with a tool; async, to be awaited on the event loop."""

    async def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def score(self, answer: str) -> float:
        return float("5" in answer)


HERE = f"{Path(__file__).stem}:"
"""what the names of these environments begin with"""
