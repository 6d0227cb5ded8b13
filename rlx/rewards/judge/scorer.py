"""The reward function `judge`: asks a language model for scores of completions, or for a ranking of a prompt's.

A question that gets no verdict scores reward.judge_default and is counted. It ends a run only if no other question of
the step gets a reply either, or if the server is away and reward.on_timeout is fail. Left out: the connection and its
retries, and the wording.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rlx.config.sections.reward import RewardConfig
from rlx.rewards.custom import RewardError, brief
from rlx.rewards.json_server import JsonServer, UnreadableError, UselessAnswerError
from rlx.rewards.judge.cache import ReplyCache, key_of
from rlx.rewards.judge.rubric import JudgeReply, Rubric, ranks, shuffled
from rlx.types import MarkedScores, Response

_LOG = logging.getLogger("rlx")
_PATH = "/chat/completions"
_ONLY = 0.5
"""the score of a completion that no other of its prompt is compared with"""


@dataclass(frozen=True)
class JudgeQuestion:
    """One request, and the completions that its reply is about, in the order in which the request has them."""

    text: str
    prompt: int  # its id; the tokens of one prompt differ where an environment begins differently, or fails
    completions: tuple[str, ...]


@dataclass(frozen=True)
class Judge:
    """The scorer that asks a judge.

    Raises RewardError where it is called: the server does not answer a request and reward.on_timeout is fail, or no
    question gets a reply and at least one was refused, or answered with nothing of use.
    """

    server: JsonServer
    rubric: Rubric
    config: RewardConfig
    cache: ReplyCache
    warned: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """set once a person was told of replies without a score"""

    @classmethod
    def from_config(cls, config: RewardConfig, cache: ReplyCache) -> Judge:
        """The judge of a config, with the key that the environment holds.

        Raises:
            ConfigError: the rubric, the address or the key is not valid.
        """
        assert config.judge_url is not None  # RewardConfig checks it where reward.functions has judge
        server = JsonServer.from_config("judge_url", config.judge_url, config.judge_url_key_env, config)
        path = server.url.partition("?")[0].rstrip("/")
        query = server.url.partition("?")[2]
        url = (path if path.endswith(_PATH) else path + _PATH) + (f"?{query}" if query else "")
        return cls(replace(server, url=url), Rubric.from_config(config), config, cache)

    @property
    def address(self) -> str:
        """The URL as messages show it: without password and query."""
        return self.server.address

    @property
    def wanted(self) -> str:
        """What a reply should have in it, for messages."""
        if self.config.judge_mode == "rank":
            return "which should end with all numbers, as in 'Ranking: 2 > 1'"
        low, high = self.config.judge_scale
        return f"where reward.judge_pattern {self.config.judge_pattern!r} should find a number from {low:g} to {high:g}"

    def __call__(self, responses: Sequence[Response], *, needs_all: bool = False) -> MarkedScores:
        """One score per response, and whether the judge gave none.

        Args:
            needs_all: one question that is refused, or answered with nothing of use, is enough for a RewardError, and
                so are replies of which none has a score.
        """
        questions = list(dict.fromkeys(self._questions(responses)))
        replies = self._replies(list(dict.fromkeys(question.text for question in questions)))
        useless = [each for each in replies.values() if isinstance(each, UselessAnswerError)]
        if useless and (needs_all or not any(isinstance(each, JudgeReply) for each in replies.values())):
            raise useless[0]  # without any reply there is nothing to learn from; a key may be revoked
        scores = {question: self._scores(question, replies[question.text]) for question in questions}
        if needs_all and questions and all(None in given for given in scores.values()):
            reply = _shown(replies[questions[0].text])
            raise RewardError(f"reward judge: no score is in what it replied, {self.wanted}: {reply}")
        self._warn([replies[question.text] for question in questions if None in scores[question]], len(questions))
        found = dict[tuple[int, str], float | None]()
        for question, given in scores.items():
            found |= zip([(question.prompt, text) for text in question.completions], given, strict=True)
        values = [found.get((response.prompt.id, response.text), _ONLY) for response in responses]
        default = self.config.judge_default
        return MarkedScores(
            [default if score is None else score for score in values],
            {"judge_failed": [float(score is None) for score in values]},
        )

    def _warn(self, failed: Sequence[JudgeReply | RewardError], asked: int) -> None:
        """Says which replies gave no score, at the first time: after that reward/judge_failed has the share."""
        if not failed or self.warned.is_set():
            return
        self.warned.set()
        _LOG.warning(
            "reward judge: %d of %d replies gave no score (first: %s); they score reward.judge_default %g",
            len(failed),
            asked,
            _shown(failed[0]),
            self.config.judge_default,
        )

    def _questions(self, responses: Sequence[Response]) -> Iterator[JudgeQuestion]:
        if self.config.judge_mode == "score":
            for one in responses:
                text = self.rubric.question(one.prompt.question, one.prompt.answer, one.text)
                yield JudgeQuestion(text, one.prompt.id, (one.text,))
            return
        groups = groupby(sorted(responses, key=lambda one: one.prompt.id), key=lambda one: one.prompt.id)
        for number, (first, *others) in groups:
            different = list(dict.fromkeys(one.text for one in (first, *others)))
            if len(different) > 1:
                prompt, order = first.prompt, shuffled(different, self.config.judge_seed, first.prompt.question)
                yield JudgeQuestion(self.rubric.comparison(prompt.question, prompt.answer, order), number, tuple(order))

    def _replies(self, texts: Sequence[str]) -> dict[str, JudgeReply | RewardError]:
        """What `_reply` gives for each question."""
        try:
            with ThreadPoolExecutor(self.config.judge_parallel) as pool:
                return dict(zip(texts, pool.map(self._reply, texts), strict=True))
        finally:
            self.cache.flush()

    def _scores(self, question: JudgeQuestion, reply: JudgeReply | RewardError) -> Sequence[float | None]:
        if isinstance(reply, RewardError):
            return [None] * len(question.completions)
        if self.config.judge_mode == "score":
            return [self.rubric.score(reply.conclusion)]
        return ranks(reply.conclusion, len(question.completions)) or [None] * len(question.completions)

    def _reply(self, text: str) -> JudgeReply | RewardError:
        """What the judge says, now or in an earlier run, or why it says nothing if that is allowed."""
        request = {
            "model": self.config.judge_model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "seed": self.config.judge_seed,
            "max_tokens": self.config.judge_max_tokens,
        }
        key = key_of(request)
        reply = self.cache.get(key)
        if reply is None:
            try:
                reply = self.server.ask(request, reply_in)
            except RewardError as error:
                if self.config.on_timeout == "fail" and not isinstance(error, UselessAnswerError):
                    raise
                return error
            self.cache.add(key, reply)
        return reply


def reply_in(answer: Any) -> JudgeReply:
    """The reply in a chat server's answer, "" if the model wrote none; UnreadableError if it is no such answer."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (TypeError, KeyError, IndexError):
        raise UnreadableError("answered without choices[0].message.content") from None
    return JudgeReply(text if isinstance(text, str) else "", choice.get("finish_reason") == "length")


def _shown(reply: JudgeReply | RewardError) -> str:
    """A reply without a verdict, or why there is none, for messages."""
    if isinstance(reply, RewardError):
        return str(reply)
    return f"{brief(reply.text)}{', which reward.judge_max_tokens cut' if reply.is_cut else ''}"
