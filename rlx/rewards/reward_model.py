"""Learnt rewards: actors that hold a Hugging Face sequence classifier with one label, and the scorer that asks them.

How a text becomes token ids is said here once, for scoring and for training alike. Left out: training (preferences.py),
and models that are spread over several GPUs. Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.config.errors import ConfigError
from rlx.types import Response

if TYPE_CHECKING:
    from torch import Tensor


ATTEMPTS = 3  # that a call gets when its replica dies; scoring has no state, so it can be asked again


class RewardModelError(RuntimeError):
    """A reward model failed or did not answer; the text names the replica."""


# ---------------------------------------------------------------------------------------------------------------------
# The classifier


def encode_response(tokenizer: Any, question: str, completion: str, system: str | None = None) -> list[int]:
    """The token ids that are scored: the chat of question and completion, or both joined if there is no chat template.

    The end token comes last, put there if neither template nor tokenizer did.
    """
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        ids = list(tokenizer.apply_chat_template(messages, return_dict=False))
    else:
        ids = list(tokenizer(f"{system}\n\n{question}{completion}" if system else question + completion).input_ids)
    end = tokenizer.eos_token_id
    return ids if end is None or end in ids[-2:] else [*ids, end]  # many templates put a newline behind it


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices by length, in batches of at most `budget` tokens, padding included; a longer row is alone in its."""
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

    def rows(self, pairs: Sequence[tuple[str, str]], system: str | None = None) -> list[list[int]]:
        """Token ids of each (question, completion).

        Those beyond the model's positions are cut on the left, behind the first token: that may be what a model of
        BERT's kind reads its score from.
        """
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limit = min(positions or self.tokenizer.model_max_length, self.tokenizer.model_max_length)
        rows = [encode_response(self.tokenizer, question, completion, system) for question, completion in pairs]
        return [row if len(row) <= limit else row[:1] + row[1 - limit :] for row in rows]

    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """`[B]` scores of rows of token ids, with gradient; padding on the right, unseen."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ids = [torch.tensor(row) for row in rows]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        padded = pad_sequence(ids, batch_first=True, padding_value=self.model.config.get_text_config().pad_token_id)
        output = self.model(input_ids=padded.to(self.model.device), attention_mask=mask.to(self.model.device))
        return output.logits[:, 0].float()


def load_classifier(
    path: str, *, new_head: bool = False, trust_remote_code: bool = False, setting: str = "reward.model"
) -> Classifier:
    """The classifier in a Hugging Face folder or of that name, in float32 and without dropout.

    Args:
        new_head: the model may be any; if it has no layer that scores, it gets one with random weights.
        setting: what an error names as the origin of the path.

    Raises:
        ConfigError: it cannot be loaded, is no classifier, or has several labels.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options: dict[str, Any] = {"num_labels": 1} if new_head else {}
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype="float32", output_loading_info=True, trust_remote_code=trust_remote_code, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if Path(path).is_dir() else "no such folder, nor a model on the hub"
        raise ConfigError(f"{setting} {path}: {reason}") from None
    if found["missing_keys"] and not new_head:
        raise ConfigError(
            f"{setting} {path}: no sequence classifier, it lacks {', '.join(sorted(found['missing_keys']))}"
        )
    if model.config.num_labels != 1:
        raise ConfigError(f"{setting} {path}: its classifier has {model.config.num_labels} labels, expected 1")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = pad  # decoders look for a text's last token by it
    model.config.use_cache = False
    return Classifier(model.eval(), tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# Actors, and whoever asks them


class RewardModel:
    """The actor around a classifier: float32 on CPU, bfloat16 on GPU. In float32 a score does not hang on its batch."""

    def __init__(
        self,
        model: str,
        *,
        batch_tokens: int = 16_384,
        system: str | None = None,
        trust_remote_code: bool = False,
        on_gpu: bool = False,
    ) -> None:
        """Loads it; `model` is a folder or name, `batch_tokens` the most of one forward pass, padding included."""
        self._classifier = load_classifier(model, trust_remote_code=trust_remote_code)
        self._batch_tokens, self._system = batch_tokens, system
        if on_gpu:
            self._classifier.model.to("cuda").bfloat16()

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """One score per (question, completion), in their order."""
        import torch

        rows = self._classifier.rows(pairs, self._system)
        scores = [0.0] * len(rows)
        with torch.inference_mode():
            for batch in token_batches([len(row) for row in rows], self._batch_tokens):
                for i, score in zip(batch, self._classifier.scores([rows[i] for i in batch]).tolist(), strict=True):
                    scores[i] = score
        return scores


def start_reward_models(
    model: str, resources: dict[str, float], group: PlacementGroup, bundles: Sequence[int], **options: Any
) -> list[Any]:
    """A reward model actor in each of these bundles of a placement group; does not wait for them.

    Args:
        model: Hugging Face folder or name.
        resources: what each takes of its bundle, as Ray names it.
        options: batch_tokens, system and trust_remote_code, see `RewardModel`.
    """
    on_gpu = resources.get("GPU", 0) > 0
    common = dict(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        max_restarts=-1,
        max_task_retries=ATTEMPTS - 1,
        runtime_env={"env_vars": {} if on_gpu else {"OMP_NUM_THREADS": "1"}},
    )
    places = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in bundles]
    actor = ray.remote(RewardModel)
    return [actor.options(scheduling_strategy=p, **common).remote(model, on_gpu=on_gpu, **options) for p in places]


@dataclass(frozen=True)
class ModelReward:
    """One rank's way to the reward models: a scorer. Called with no responses it only waits until all are loaded."""

    replicas: Sequence[Any]
    timeout_s: float = 60.0
    first: int = 0  # replica that gets the first share; ranks spread by starting with different ones

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """One score per response, in their order.

        Raises:
            RewardModelError: a replica failed, died more often than it is asked again, or did not answer in time.
        """
        turns = [(self.first + turn) % len(self.replicas) for turn in range(len(self.replicas))]
        pairs = [[(response.prompt.question, response.text) for response in share] for share in self._shares(responses)]
        calls = [self.replicas[i].score.remote(share) for i, share in zip(turns, pairs, strict=True)]
        ray.wait(calls, num_returns=len(calls), timeout=self.timeout_s)
        return [score for i, call in zip(turns, calls, strict=True) for score in self._answer(i, call)]

    def _shares(self, responses: Sequence[Response]) -> list[Sequence[Response]]:
        """Runs of nearly equal numbers of characters, one per replica."""
        ends = list(itertools.accumulate(len(r.prompt.question) + len(r.text) + 1 for r in responses))
        count, total = len(self.replicas), ends[-1] if ends else 0
        cuts = [bisect.bisect_right(ends, total * k / count) for k in range(count + 1)]
        return [responses[start:stop] for start, stop in itertools.pairwise(cuts)]

    def _answer(self, replica: int, call: Any) -> list[float]:
        try:
            return list(ray.get(call, timeout=0))  # it has been waited for
        except ray.exceptions.GetTimeoutError:
            raise RewardModelError(f"reward model {replica} did not answer within {self.timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise RewardModelError(f"reward model {replica} failed: {' '.join(str(error.cause).split())}") from None
        except ray.exceptions.RayError as error:
            # Of one that did not start, Ray gives a whole traceback, the cause in its last line.
            raise RewardModelError(f"reward model {replica} died: {str(error).strip().splitlines()[-1]}") from None
