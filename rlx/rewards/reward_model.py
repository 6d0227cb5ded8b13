"""Learnt rewards: actors that hold a Hugging Face sequence classifier with one label, and the scorer that asks them.

`Classifier` defines how a text becomes token ids, for scoring and for training alike. Left out: training
(preferences), and models that are spread over several GPUs. Importing this module imports neither torch nor
transformers.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.actors import CallError, CallFailedError, CallTimeoutError, wait_for
from rlx.config.errors import ConfigError
from rlx.types import Response

if TYPE_CHECKING:
    from torch import Tensor


_ATTEMPTS = 3
"""attempts of a call whose replica dies; scoring has no state, so a call can be repeated"""


class RewardModelError(RuntimeError):
    """A reward model failed or did not answer; the text names the replica."""


# --- the classifier


class Exchange(NamedTuple):
    """What a reward model scores."""

    question: str
    completion: str
    finished: bool = True  # false: the completion was cut at its longest


def encode_response(tokenizer: Any, exchange: Exchange, system: str | None = None) -> list[int]:
    """The token ids that are scored: the chat of question and completion, or the text of both without a chat template.

    A finished completion ends with the end token; it is added where neither the template nor the tokenizer adds it. One
    that was cut has no end, of the turn or of the text: a model that has learnt from finished ones sees the difference
    ("EOS trick" of Huang et al. 2024, arXiv 2403.17031).
    """
    if tokenizer.chat_template:
        ids = _chat_ids(tokenizer, exchange, system)
    else:
        text = exchange.question + exchange.completion
        ids = list(tokenizer(f"{system}\n\n{text}" if system else text).input_ids)
    end = tokenizer.eos_token_id
    if end is None:
        return ids
    if exchange.finished:
        return ids if end in ids[-2:] else [*ids, end]  # many templates put a newline after it
    return ids if end not in ids[-2:] else ids[: -1 - ids[::-1].index(end)]


def _chat_ids(tokenizer: Any, exchange: Exchange, system: str | None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": exchange.question}, {"role": "assistant", "content": exchange.completion}]
    if not exchange.finished:
        # Templates that change the last message refuse to leave it open.
        with contextlib.suppress(ValueError):
            return list(tokenizer.apply_chat_template(messages, return_dict=False, continue_final_message=True))
    return list(tokenizer.apply_chat_template(messages, return_dict=False))


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of rows in batches of at most `budget` tokens, padding included, the shortest rows first.

    A row that is longer than the budget is a batch of its own.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@dataclass(frozen=True)
class Classifier:
    """A sequence classifier with one label, and its tokenizer."""

    model: Any
    tokenizer: Any

    def encode(self, exchanges: Sequence[Exchange], system: str | None = None) -> list[list[int]]:
        """Token ids of each exchange.

        Rows that are longer than the context of the model lose tokens on the left, after the first token: models like
        BERT may read the score from the first token.
        """
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limit = min(positions or self.tokenizer.model_max_length, self.tokenizer.model_max_length)
        rows = [encode_response(self.tokenizer, exchange, system) for exchange in exchanges]
        return [row if len(row) <= limit else row[:1] + row[1 - limit :] for row in rows]

    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """`[B]` float32 scores of B rows of token ids, with gradient. Padding is on the right and masked."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ids = [torch.tensor(row) for row in rows]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        padded = pad_sequence(ids, batch_first=True, padding_value=self.model.config.get_text_config().pad_token_id)
        output = self.model(input_ids=padded.to(self.model.device), attention_mask=mask.to(self.model.device))
        return output.logits[:, 0].float()

    def save(self, folder: Path) -> None:
        """Writes model and tokenizer as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def load_classifier(
    path: str, *, new_head: bool = False, trust_remote_code: bool = False, setting: str = "reward.model"
) -> Classifier:
    """Loads a classifier from a Hugging Face folder or by name, in float32 and without dropout.

    Args:
        new_head: accept any model; one without a layer that scores gets one with random weights.
        setting: where the path comes from, for the text of errors.

    Raises:
        ConfigError: the model cannot be loaded, is not a classifier, or has several labels.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options: dict[str, Any] = {"num_labels": 1} if new_head else {}
    try:
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype="float32", output_loading_info=True, trust_remote_code=trust_remote_code, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if Path(path).is_dir() else "no such folder, nor a model on the hub"
        raise ConfigError(f"{setting} {path}: {reason}") from None
    if loading_info["missing_keys"] and not new_head:
        raise ConfigError(
            f"{setting} {path}: not a sequence classifier, it lacks {', '.join(sorted(loading_info['missing_keys']))}"
        )
    if model.config.num_labels != 1:
        raise ConfigError(f"{setting} {path}: its classifier has {model.config.num_labels} labels, expected 1")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = pad  # decoders use it to find the last token of a text
    model.config.use_cache = False
    return Classifier(model.eval(), tokenizer)


# --- actors, and the scorer that asks them


class RewardModel:
    """An actor with a classifier: float32 on CPU, bfloat16 on GPU. In float32 a score does not depend on its batch."""

    def __init__(
        self,
        model: str,
        *,
        batch_tokens: int = 16_384,
        system: str | None = None,
        trust_remote_code: bool = False,
        on_gpu: bool = False,
        bring: Callable[[], None] | None = None,
    ) -> None:
        """Loads the classifier.

        Args:
            model: Hugging Face folder or name.
            batch_tokens: maximum number of tokens of one forward pass, padding included.
            system: system message of the chats that are scored.
            bring: called first: brings the model's folder to this node.
        """
        if bring:
            bring()
        self._batch_tokens, self._system = batch_tokens, system
        self._refusal: ConfigError | None = None
        try:
            self._classifier = load_classifier(model, trust_remote_code=trust_remote_code)
        except ConfigError as error:  # raised here, it would look to callers like the death of the process
            self._refusal = error
            return
        if on_gpu:
            self._classifier.model.to("cuda").bfloat16()

    def score(self, exchanges: Sequence[Exchange]) -> list[float]:
        """One score per exchange, in their order.

        Raises:
            ConfigError: the model could not be loaded, see `load_classifier`.
        """
        import torch

        if self._refusal:
            raise self._refusal
        rows = self._classifier.encode(exchanges, self._system)
        scores = [0.0] * len(rows)
        with torch.inference_mode():
            for batch in token_batches([len(row) for row in rows], self._batch_tokens):
                for i, score in zip(batch, self._classifier.scores([rows[i] for i in batch]).tolist(), strict=True):
                    scores[i] = score
        return scores


def start_reward_models(
    model: str, resources: dict[str, float], group: PlacementGroup, bundles: Sequence[int], **options: Any
) -> list[Any]:
    """Starts a reward model actor in each of these bundles of a placement group, and does not wait until they run.

    Args:
        model: Hugging Face folder or name.
        resources: resources of each actor, as Ray names them.
        options: batch_tokens, system, trust_remote_code and bring, see `RewardModel`.
    """
    on_gpu = resources.get("GPU", 0) > 0
    common = dict(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        max_restarts=-1,
        max_task_retries=_ATTEMPTS - 1,
        runtime_env={"env_vars": {} if on_gpu else {"OMP_NUM_THREADS": "1"}},
    )
    strategies = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]
    actor = ray.remote(RewardModel)
    return [actor.options(scheduling_strategy=s, **common).remote(model, on_gpu=on_gpu, **options) for s in strategies]


@dataclass(frozen=True)
class ModelReward:
    """The scorer that asks the reward model actors. Called without responses it waits until all of them are loaded."""

    replicas: Sequence[Any]
    timeout_s: float = 60.0
    first: int = 0  # index of the replica that gets the first share; each rank starts with another one

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """One score per response, in their order.

        Raises:
            ConfigError: the model is none that scores; another attempt would find the same.
            RewardModelError: a replica failed, died at each of its attempts, or did not answer in time.
        """
        order = [(self.first + i) % len(self.replicas) for i in range(len(self.replicas))]
        exchanges = [
            [Exchange(r.prompt.question, r.text, r.finished) for r in share] for share in self.shares(responses)
        ]
        calls = [self.replicas[i].score.remote(share) for i, share in zip(order, exchanges, strict=True)]
        deadline = time.monotonic() + self.timeout_s
        return [score for i, call in zip(order, calls, strict=True) for score in self._result(i, call, deadline)]

    def shares(self, responses: Sequence[Response]) -> list[Sequence[Response]]:
        """Splits the responses, in order, into one share per replica with nearly equal numbers of characters."""
        ends = list(itertools.accumulate(len(r.prompt.question) + len(r.text) + 1 for r in responses))
        count, total = len(self.replicas), ends[-1] if ends else 0
        cuts = [bisect.bisect_right(ends, total * k / count) for k in range(count + 1)]
        return [responses[start:stop] for start, stop in itertools.pairwise(cuts)]

    def _result(self, replica: int, call: Any, deadline: float) -> list[float]:
        try:
            return list(wait_for(call, f"reward model {replica}", deadline))
        except CallTimeoutError:
            raise RewardModelError(f"reward model {replica} did not answer within {self.timeout_s:g} s") from None
        except CallError as error:
            if isinstance(error, CallFailedError) and isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise RewardModelError(" ".join(str(error).split())) from None
