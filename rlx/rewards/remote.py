"""Scores from a web address: posts batches of completions as JSON, several at once.

Left out: failures and retries (json_server), and which finite numbers are too large, which `scoring.score` checks.
The repository has an example of a server, experiments/reward_server.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlx.config.sections.reward import RewardConfig
from rlx.rewards.custom import brief, is_finite
from rlx.rewards.json_server import JsonServer, UnreadableError
from rlx.types import Response

_CONNECTIONS = 8


@dataclass(frozen=True)
class RemoteReward:
    """A scorer that asks a server at a web address.

    Raises RewardError where it is called: the server refuses a request, or every attempt fails.
    """

    server: JsonServer
    batch: int  # completions per request

    @classmethod
    def from_config(cls, config: RewardConfig) -> RemoteReward:
        """The scorer of reward.url, with the key that the environment holds.

        Raises:
            ConfigError: the environment variable of the key is missing, or the address or the key is not valid.
        """
        assert config.url is not None  # RewardConfig checks it where reward.functions has url
        return cls(JsonServer.from_config("url", config.url, config.url_key_env, config), config.url_batch)

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """One score per response, in their order."""
        batches = [responses[start : start + self.batch] for start in range(0, len(responses), self.batch)]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return [score for scores in pool.map(self._batch_scores, batches) for score in scores]

    def _batch_scores(self, responses: Sequence[Response]) -> list[float]:
        """The scores of one request."""
        request = {
            "prompts": [response.prompt.question for response in responses],
            "completions": [response.text for response in responses],
            "answers": [response.prompt.answer for response in responses],
        }
        return self.server.ask(request, lambda answer: scores_in(answer, responses))


def scores_in(answer: Any, responses: Sequence[Response]) -> list[float]:
    """The scores in the answer to a request; UnreadableError if they are not one finite number for each response."""
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise UnreadableError('answered without a list "scores"')
    if len(scores) != len(responses):
        raise UnreadableError(f"answered {len(scores)} scores for {len(responses)} completions")
    for response, value in zip(responses, scores, strict=True):
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_finite(value):
            where = f"prompt {response.prompt.id} ({brief(response.prompt.question)})"
            raise UnreadableError(f"answered {brief(value)}, which is not a finite score, for {where}")
    return [float(value) for value in scores]
