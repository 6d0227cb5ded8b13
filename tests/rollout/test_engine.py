"""Real engines beside the trainer's model: their completions, the weights they are sent, and how they fail."""

import copy
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from shared import start_engine, stop_engine
from torch import Tensor, nn
from transformers import AutoTokenizer

from rlx.actors import EngineLostError, RolloutError
from rlx.mesh import Mesh
from rlx.models import loading, lora, policy
from rlx.models.engine_logprobs import EngineScorer, bad_word_tokens
from rlx.rollout.base import Request, request_seed
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.vllm_engine import with_newer_runner
from rlx.rollout.weight_sync import buckets
from rlx.rollout.weight_sync.base import OBJECT_STORE, EngineLocation, Source
from rlx.rollout.weight_sync.gather import gather_full
from rlx.rollout.weight_sync.object_store import ObjectStoreSender
from rlx.rollout.weight_sync.sender import OutgoingUpdate, SendingRank, UpdatePlan, UpdateRequest
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.training import experience
from rlx.types import Completion, Prompt, Sampling, ShardedWeight, WeightSyncError

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=(1,))
CLOSE, FAR = 1e-4, 1e-2
LONG = 100  # tokens: three blocks of the prefix cache


def prompts(lengths: Sequence[int]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(6, 90, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(i, tuple(row), "question", "answer") for i, row in enumerate(rows)]


PROMPTS = prompts([3, 9, LONG, 20])


def generate_all(
    pool: EnginePool, prompts: Sequence[Prompt], sampling: Sampling, samples: int, version: int
) -> list[Completion]:
    """All completions, in the order of the prompts; an error with the engines' reasons if some are missing."""
    pending = pool.begin(prompts, [sampling] * samples, version)
    pool.finish(pending, version)
    if not pending.is_complete:
        raise EngineLostError("; ".join(pool.lost.values()))
    return pending.completions


SINGLE = Mesh(None, rank=0, world_size=1, tp=1)  # type: ignore[arg-type]  # a rank without a process group


def pushed(
    engine: Any,
    weights: Sequence[ShardedWeight],
    version: int,
    timeout_s: float = 120.0,
    midway: bool = False,
    bucket_bytes: int | None = None,
) -> dict[int, EngineLostError]:
    """Pushes to one engine through the object store; its location is not used."""
    sync = WeightSync([engine], SINGLE, torch.device("cpu"), torch.float32, None, bucket_bytes)
    return sync.push(weights, version, {0: EngineLocation("", ())}, timeout_s=timeout_s, midway=midway)


@pytest.mark.parametrize("given", [None, "0"])
@pytest.mark.parametrize("knows_some_by_name", [True, False])
@pytest.mark.parametrize("refusal", [None, "Model Runner V2 does not yet support: hybrid models", "no such model"])
def test_the_newer_runner_is_tried_first(
    given: str | None, knows_some_by_name: bool, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the part of vLLM 0.24 on a GPU that decides."""
    choice = SimpleNamespace(**{"DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES": ()} if knows_some_by_name else {})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(vllm=choice))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", given or "")
    if given is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    tried: list[str | None] = []

    def build() -> int:
        tried.append(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))
        if refusal and tried[-1] == "1":
            raise ValueError(refusal)
        return len(tried)

    asks = given is None and knows_some_by_name
    if asks and refusal == "no such model":
        with pytest.raises(ValueError, match=refusal):
            with_newer_runner(build)
        return
    assert with_newer_runner(build) == len(tried)
    assert tried == ([given] if not asks else ["1", None] if refusal else ["1"])


@dataclass
class Side:
    """An engine and the trainer's model that it should agree with."""

    engine: Any
    policy: policy.Policy
    version: int = 0
    weights: Callable[[nn.Module], list[ShardedWeight]] = lora.engine_weights  # what is sent of the policy

    def push(self) -> None:
        self.version += 1
        assert list(EnginePool([self.engine], seed=0).probe(60)) == [0]  # it may be starting
        assert pushed(self.engine, self.weights(self.policy), self.version) == {}

    def change(self) -> None:
        """Changes the weights as an update does, but more."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in (p for p in self.policy.parameters() if p.requires_grad):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    def generate(self, sampling: Sampling = SAMPLING, samples: int = 2, timeout_s: float = 60.0) -> list[Completion]:
        return generate_all(
            EnginePool([self.engine], seed=0, timeout_s=timeout_s), PROMPTS, sampling, samples, self.version
        )

    def gap(self, completions: Sequence[Completion], temperature: float = 1.0) -> float:
        """The largest difference between the engine's logprobs and the policy's."""
        return float(self.gaps(completions, temperature).max())

    @torch.no_grad()
    def gaps(self, completions: Sequence[Completion], temperature: float = 1.0) -> Tensor:
        """The difference at each token, `[B, T]`; 0 outside responses."""
        batch = experience.build_batch(completions, 0)
        scored = self.policy(batch.response_tokens(), temperature)
        return ((scored.logprobs - batch.rollout_logprobs) * batch.mask).abs()


versions = iter(range(1, 10_000, 100))  # so that no test uses the weights of another


def side_of(engine: Any, folder: Path) -> Side:
    side = Side(engine, loading.load_policy(str(folder), head=None), next(versions))
    side.push()
    return side


@pytest.fixture
def tied(engines: tuple[Any, Any], tiny_model: Path) -> Side:
    return side_of(engines[0], tiny_model)


@pytest.fixture
def untied(engines: tuple[Any, Any], untied_model: Path) -> Side:
    return side_of(engines[1], untied_model)


ADAPTERS = lora.Adapters(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), seed=0)


@pytest.fixture
def merged(tied: Side, tiny_model: Path) -> Side:
    """A policy with adapters, and an engine that takes whole models."""
    policy = loading.load_policy(str(tiny_model), head=None, adapters=ADAPTERS)
    side = Side(tied.engine, policy, next(versions))
    side.push()
    return side


@pytest.fixture(scope="module")
def adapter_engine(ray_cluster: None, tiny_model: Path) -> Iterator[Any]:
    description = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
    engine = start_engine(tiny_model, description)
    yield engine
    stop_engine(engine)


@pytest.fixture
def adapted(adapter_engine: Any, tiny_model: Path) -> Side:
    """A policy with adapters, and an engine that takes adapters only."""
    policy = loading.load_policy(str(tiny_model), head=None, adapters=ADAPTERS)
    side = Side(adapter_engine, policy, next(versions), lora.adapter_weights)
    side.push()
    return side


@pytest.fixture(params=["tied", "untied"])
def side(request: pytest.FixtureRequest) -> Side:
    return request.getfixturevalue(request.param)


# --- completions


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engine_agrees_with_the_trainer_before_and_after_an_update(side: Side, temperature: float) -> None:
    sampling = replace(SAMPLING, temperature=temperature)
    assert side.gap(side.generate(sampling), temperature) < CLOSE
    side.change()
    assert side.gap(side.generate(sampling), temperature) > FAR  # the update has not been sent yet
    side.push()
    assert side.gap(side.generate(sampling), temperature) < CLOSE


@pytest.mark.parametrize(
    "kind",
    ["merged", pytest.param("adapted", marks=pytest.mark.slow)],  # it takes an engine of its own
)
def test_the_engine_agrees_with_a_policy_with_adapters(kind: str, request: pytest.FixtureRequest) -> None:
    side: Side = request.getfixturevalue(kind)
    for _ in range(2):
        assert side.gap(side.generate()) < CLOSE
        side.change()
        assert side.gap(side.generate()) > FAR
        side.push()
    assert side.gap(side.generate()) < CLOSE
    with lora.adapters_off(side.policy):
        assert side.gap(side.generate()) > FAR


def test_adapters_alone_are_little_to_send(merged: Side) -> None:
    kinds = (lora.adapter_weights, lora.engine_weights)
    alone, whole = (sum(math.prod(weight.shape) for weight in kind(merged.policy)) for kind in kinds)
    assert alone * 10 < whole
    assert {weight.name.partition(".lora_")[2] for weight in lora.adapter_weights(merged.policy)} == {
        "A.weight",
        "B.weight",
    }


def test_another_temperature_is_seen(tied: Side) -> None:
    assert tied.gap(tied.generate(replace(SAMPLING, temperature=0.7)), 1.0) > FAR


@torch.no_grad()
def test_logprobs_of_a_cut_distribution_are_renormalised(tied: Side) -> None:
    sampling = replace(SAMPLING, temperature=0.7, top_k=5)
    lm: Any = tied.policy.lm
    for completion in tied.generate(sampling):
        prompt = completion.prompt.token_ids
        logits = (
            lm(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1] / sampling.temperature
        )
        cut = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
        expected = torch.log_softmax(cut, -1).gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=CLOSE, rtol=0)


# --- sampling options


OPTIONS: list[dict[str, Any]] = [
    {"min_p": 0.3},
    {"min_tokens": 9, "stop_token_ids": (1, 20, 21, 22, 23, 24, 25)},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": -1.0},
    {"bad_words": ("1", "+ 2", "= ")},
    {"options": (("logit_bias", {"7": 3.0, "8": -50.0}), ("allowed_token_ids", list(range(40))))},
    {"min_p": 0.05, "top_k": 9, "top_p": 0.8, "temperature": 1.4, "repetition_penalty": 0.8, "min_tokens": 4},
]


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_an_engine_draws_from_the_distribution_that_the_options_describe(
    tied: Side, tiny_model: Path, options: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sampling = replace(SAMPLING, **options)
    completions = tied.generate(sampling, samples=4)
    batch = experience.build_batch(completions, 0)
    tokens = batch.response_tokens()
    plain = tied.policy(tokens, sampling.temperature).logprobs
    assert ((plain - batch.rollout_logprobs) * batch.mask).abs().max() > FAR
    bad = bad_word_tokens(tokenizer, sampling.bad_words)
    tied.policy.engine_scorer = EngineScorer(tokens, batch.prompt_lengths, sampling, bad)
    scored = tied.policy(tokens, sampling.temperature).logprobs
    assert ((scored - batch.rollout_logprobs) * batch.mask).abs().max() < CLOSE
    tied.policy.engine_scorer = None
    assert all(len(each.token_ids) >= sampling.min_tokens for each in completions)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(tied: Side, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    endless = replace(SAMPLING, stop_token_ids=(), max_tokens=40)
    whole = tied.generate(endless, samples=2)
    texts = [tokenizer.decode(each.token_ids) for each in whole]
    stop = texts[0][2:4]  # two tokens of one character each
    cut = tied.generate(replace(endless, stop=(stop, "never")), samples=2)
    assert cut[0].finished and len(cut[0].token_ids) < 40
    for text, before, after in zip(texts, whole, cut, strict=True):
        assert after.finished == (before.finished or stop in text)
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert after.logprobs == before.logprobs[: len(after.token_ids)]
        assert stop not in tokenizer.decode(after.token_ids[:-1])
        assert (stop in tokenizer.decode(after.token_ids)) == (stop in text)
    late = tied.generate(replace(endless, stop=(stop,), min_tokens=10), samples=2)
    assert all(len(each.token_ids) >= 10 for each in late)


def test_a_special_token_may_be_a_stop_string(tied: Side, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    biased = (("logit_bias", {str(tokenizer.eos_token_id): 20.0}),)
    sampling = replace(SAMPLING, stop_token_ids=(), stop=(tokenizer.eos_token,), options=biased)
    for completion in tied.generate(sampling, samples=1):
        assert completion.finished and completion.token_ids[-1] == tokenizer.eos_token_id


def test_an_option_with_a_value_that_vllm_refuses_fails_that_request(tied: Side) -> None:
    with pytest.raises(RolloutError, match="token_id"):
        tied.generate(replace(SAMPLING, options=(("allowed_token_ids", [10**6]),)))


def test_a_completion_depends_on_nothing_but_its_seed(tied: Side, untied: Side) -> None:
    completions = tied.generate(samples=3)
    assert tied.generate(samples=3) == completions
    pool = EnginePool([tied.engine], seed=0)
    backwards = generate_all(pool, PROMPTS[::-1], SAMPLING, 3, tied.version)
    assert sorted(backwards, key=lambda c: (c.prompt.id, c.sample)) == completions
    # The other engine with the same weights, which for it are not tied.
    weights = lora.engine_weights(tied.policy)
    (embedding,) = (weight for weight in weights if weight.name == "model.embed_tokens.weight")
    head = replace(embedding, name="lm_head.weight")
    assert pushed(untied.engine, [*weights, head], tied.version) == {}
    pair = EnginePool([tied.engine, untied.engine], seed=0, rank=1)
    assert generate_all(pair, PROMPTS, SAMPLING, 3, tied.version) == completions
    assert generate_all(EnginePool([tied.engine], seed=1), PROMPTS, SAMPLING, 3, tied.version) != completions


def test_samples_of_a_prompt_differ(tied: Side) -> None:
    completions = tied.generate(samples=8)
    for prompt in PROMPTS:
        own = [c for c in completions if c.prompt is prompt]
        assert [c.sample for c in own] == list(range(8))
        assert len({c.token_ids for c in own}) > 4


def test_a_stop_token_ends_a_completion_and_is_part_of_it(tied: Side) -> None:
    endless = tied.generate(replace(SAMPLING, stop_token_ids=()), samples=1)
    for completion in endless:
        assert completion.finished == (len(completion.token_ids) < SAMPLING.max_tokens or completion.token_ids[-1] == 1)
    cut = max(endless, key=lambda c: len(c.token_ids))
    stop = cut.token_ids[3]
    again = tied.generate(replace(SAMPLING, stop_token_ids=(stop,)), samples=1)[cut.prompt.id]
    length = cut.token_ids.index(stop) + 1
    assert again.finished
    assert again.token_ids == cut.token_ids[:length]
    assert again.logprobs == cut.logprobs[:length]


@pytest.mark.slow
def test_what_an_engine_works_on_is_counted_with_the_cache_that_it_may_need(tied: Side) -> None:
    requests = [Request((1, 2, 3), 0, SAMPLING), Request((1,), 1, SAMPLING)]

    def counted(engine: Any) -> list[tuple[int, int]]:
        found = []
        metrics = engine._metrics
        for sign in (1, -1):
            metrics._add(requests, sign)
            found.append((metrics._in_work, metrics._needed))
        return [*found, (metrics._cache_tokens, 0)]

    tied.generate()
    during, after, (cache, _) = ray.get(tied.engine.__ray_call__.remote(counted))
    assert (during, after) == ((2, 4 + 2 * SAMPLING.max_tokens), (0, 0)) and cache > 1000


def test_max_tokens_truncates(tied: Side) -> None:
    longer = tied.generate(samples=4)
    for short, long in zip(tied.generate(replace(SAMPLING, max_tokens=2), samples=4), longer, strict=True):
        assert short.token_ids == long.token_ids[:2]
        assert short.finished == (1 in short.token_ids)
        assert short.version == tied.version


def test_a_prompt_that_cannot_be_taken_fails_alone(tied: Side) -> None:
    (endless,) = prompts([1000])
    pool = EnginePool([tied.engine], seed=0)
    with pytest.raises(RolloutError, match=r"engine 0 refused a prompt: .*256"):
        generate_all(pool, [endless], SAMPLING, 1, tied.version)
    assert pool.lost == {}
    assert tied.gap(tied.generate()) < CLOSE


def test_logprobs_that_are_not_asked_for_change_no_token(tied: Side) -> None:
    reported = tied.generate(samples=3)
    silent = replace(SAMPLING, logprobs=False)
    completions = generate_all(EnginePool([tied.engine], seed=0), PROMPTS, silent, 3, tied.version)
    assert [each.token_ids for each in completions] == [each.token_ids for each in reported]
    assert all(each.logprobs == () for each in completions) and all(each.logprobs for each in reported)


def test_request_seeds_are_stable_and_distinct() -> None:
    assert request_seed(0, 1, 2, 3) == 4207613231832888560
    grid = {request_seed(r, s, p, k) for r in range(3) for s in range(3) for p in range(12) for k in range(12)}
    assert len(grid) == 3 * 3 * 12 * 12
    assert max(grid) < 2**63


# --- which engine generates


def test_prompts_are_spread_evenly_and_each_goes_to_one_engine() -> None:
    pool = EnginePool([None] * 3, seed=0)
    shares = pool.routes({i: 26 for i in range(9)}, range(3))
    assert sorted(i for share in shares.values() for i in share) == list(range(9))
    assert [len(share) for share in shares.values()] == [3, 3, 3]
    one_long = pool.routes({i: 216 if i == 3 else 26 for i in range(7)}, range(3))
    assert sorted(len(share) for share in one_long.values()) == [1, 3, 3]
    # Those that have much to do already get less.
    pool._loads[1] = 52
    assert [len(share) for share in pool.routes({i: 26 for i in range(7)}, range(3)).values()] == [3, 1, 3]


def test_engines_that_are_lost_get_no_prompts() -> None:
    shares = EnginePool([None] * 3, seed=0).routes({i: 26 for i in range(4)}, [0, 2])
    assert {index: len(share) for index, share in shares.items()} == {0: 2, 2: 2}


def test_every_rank_begins_with_another_engine() -> None:
    shares = [EnginePool([None] * 3, seed=0, rank=rank).routes({0: 26}, range(3)) for rank in range(4)]
    assert shares == [{0: [0]}, {1: [0]}, {2: [0]}, {0: [0]}]


# --- weights on their way


def tensors(dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (7, 3), "b": (), "c": (64, 32), "d": (5,), "e": (1, 2, 3)}
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


def weight(name: str, tensor: Tensor) -> ShardedWeight:
    return ShardedWeight(name, tuple(tensor.shape), (tensor,))


def packed(weights: Sequence[ShardedWeight], dtype: torch.dtype = torch.float32) -> buckets.Bucket:
    return buckets.pack(buckets.layout(weights, dtype), gather_full(weights, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_tensors_survive_buckets_of_any_size(dtype: torch.dtype, bucket_bytes: int) -> None:
    sent = tensors(dtype)
    parts = [
        packed(group, dtype) for group in buckets.group_weights([weight(*pair) for pair in sent], dtype, bucket_bytes)
    ]
    assert len(parts) == {1: 5, 100: 3, 1 << 20: 1}[bucket_bytes]
    received = [pair for bucket in parts for pair in buckets.unpack(bucket)]
    assert [name for name, _ in received] == [name for name, _ in sent]
    torch.testing.assert_close([t for _, t in received], [t for _, t in sent], atol=0, rtol=0)


@pytest.mark.parametrize("part", ["data", "name", "shape"])
def test_a_checksum_covers_names_shapes_and_bytes(part: str) -> None:
    bucket = packed([weight(*tensors(torch.float32)[0])])
    data, layout = bucket.data.copy(), {"name": ("x", "float32", (7, 3)), "shape": ("a", "float32", (3, 7))}
    data[5] ^= part == "data"
    changed = replace(bucket, data=data, layout=(layout.get(part, bucket.layout[0]),))
    with pytest.raises(WeightSyncError, match="checksum"):
        list(buckets.unpack(changed))


def test_an_update_in_many_buckets_is_whole(tied: Side) -> None:
    tied.change()
    tied.version += 1
    weights = lora.engine_weights(tied.policy)
    assert pushed(tied.engine, weights, tied.version, bucket_bytes=1000) == {}
    assert tied.gap(tied.generate()) < CLOSE


ENDLESS = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=150, stop_token_ids=())


def pushed_meanwhile(side: Side, midway: bool) -> tuple[Tensor, Tensor]:
    """Pushes new weights while completions are generated.

    Returns:
        How far each token's logprob is from the old policy's, and from the new policy's, `[B, T]` both.
    """
    pool = EnginePool([side.engine], seed=0)
    pending = pool.begin(PROMPTS, [ENDLESS] * 24, side.version)
    time.sleep(0.2)
    old = copy.deepcopy(side.policy)
    side.change()
    side.version += 1
    weights = lora.engine_weights(side.policy)
    assert pushed(side.engine, weights, side.version, midway=midway) == {}
    pool.finish(pending, side.version)
    assert {one.version for one in pending.completions} == {side.version - 1}
    return replace(side, policy=old).gaps(pending.completions), side.gaps(pending.completions)


@pytest.mark.slow
def test_completions_in_progress_are_finished_before_new_weights_are_loaded(tied: Side) -> None:
    old, new = pushed_meanwhile(tied, midway=False)
    assert old.max() < CLOSE < FAR < new.max()
    assert tied.gap(tied.generate()) < CLOSE


@pytest.mark.slow
def test_completions_in_progress_go_on_with_new_weights_where_that_is_asked_for(tied: Side) -> None:
    old, new = pushed_meanwhile(tied, midway=True)
    # Up to some token each is of the old policy, and of the new one from there on.
    switched = (old < CLOSE).long().cumprod(1).sum(1)
    rest = torch.arange(old.shape[1]).unsqueeze(0) >= switched.unsqueeze(1)
    assert (new * rest).max() < CLOSE
    assert 0 < switched.float().mean() < ENDLESS.max_tokens
    assert tied.gap(tied.generate()) < CLOSE


def test_another_version_than_the_engine_holds_is_refused(tied: Side) -> None:
    tied.version += 1
    with pytest.raises(RolloutError, match=rf"engine 0 failed: .*{tied.version} but holds version {tied.version - 1}"):
        tied.generate()


@dataclass
class Begun:
    """A weight update of one engine that waits for its buckets."""

    update: OutgoingUpdate
    sender: ObjectStoreSender
    parts: list[buckets.Bucket]

    def send(self, *parts: buckets.Bucket) -> None:
        for bucket in parts:
            self.sender.put(bucket)

    def finish(self) -> str:
        """Why the engine did not take the update."""
        self.sender.finish()
        return str(self.update.failed[0])


def no_buffer(number: int, nbytes: int, is_shared: bool) -> tuple[Tensor, bytes]:
    raise AssertionError("the object store uses no buffers")


def begun(side: Side, timeout_s: float) -> Begun:
    weights = lora.engine_weights(side.policy)
    groups = buckets.group_weights(weights, torch.float32, 100_000)
    layouts = tuple(buckets.layout(group, torch.float32) for group in groups)
    plan = UpdatePlan(f"update {next(versions)}", ("", 0), "", {0: (Source(OBJECT_STORE, 0),)}, {})
    sender = ObjectStoreSender()
    rank = SendingRank(0, torch.device("cpu"), [side.engine], {OBJECT_STORE: sender}, no_buffer)
    update = OutgoingUpdate(plan, UpdateRequest(side.version + 1, layouts, timeout_s, midway=False), rank)
    update.connect()
    assert update.failed == {}
    return Begun(update, sender, [packed(group) for group in groups])


def assert_only_an_update_helps(side: Side) -> None:
    with pytest.raises(RolloutError, match=r"engine 0 failed: .*holds version None"):
        side.generate()
    side.change()
    side.push()
    assert side.gap(side.generate()) < CLOSE


def test_a_corrupted_bucket_is_refused(side: Side) -> None:
    update = begun(side, timeout_s=60)
    update.parts[2].data[1000] ^= 1
    update.send(*update.parts)
    assert "engine 0 failed: checksum" in update.finish()
    assert_only_an_update_helps(side)


def test_missing_weights_are_an_error_in_time(side: Side) -> None:
    update = begun(side, timeout_s=1)
    update.send(*update.parts[:-1])
    # The engine's own deadline comes first and tells more.
    update.update.request = replace(update.update.request, timeout_s=31)
    assert re.search(r"engine 0 failed: waited 3 s .* tensors missing", update.finish())
    assert_only_an_update_helps(side)


def test_a_new_update_ends_one_whose_sender_has_died(tied: Side) -> None:
    update = begun(tied, timeout_s=300)
    update.send(update.parts[0])
    started = time.monotonic()
    assert_only_an_update_helps(tied)
    assert time.monotonic() - started < 60
    update.send(update.parts[1])  # the dead sender's last one
    assert tied.gap(tied.generate()) < CLOSE
    assert re.search(r"engine 0 failed: .*another weight update", update.finish())


# --- engines that fail


@contextmanager
def hanging(engine: Any) -> Iterator[None]:
    pid = ray.get(engine.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow  # the engine is stopped and started again
def test_a_hanging_engine_is_named_in_time(tied: Side) -> None:
    weights = lora.engine_weights(tied.policy)
    with hanging(tied.engine):
        failed = pushed(tied.engine, weights, tied.version + 1, timeout_s=1)
        assert "engine 0 did not answer in time" in str(failed[0])
        with pytest.raises(EngineLostError, match="engine 0 did not answer in time"):
            tied.generate(timeout_s=1)
        time.sleep(1)  # it has been killed by now, as nothing else ends it
    tied.push()  # waits for the new one
    assert tied.gap(tied.generate()) < CLOSE


@pytest.mark.slow
def test_an_engine_that_vllm_leaves_broken_is_started_afresh(untied: Side) -> None:
    nonsense = [weight("nonsense", torch.zeros(3))]
    failed = pushed(untied.engine, nonsense, untied.version + 1)
    assert re.search(r"engine 0 failed: ValueError: .*nonsense", str(failed[0]))
    time.sleep(2)  # it tells its callers before it ends
    with pytest.raises(RolloutError, match="engine 0 died"):
        untied.generate()
    untied.change()
    untied.push()  # waits for the new one
    assert untied.gap(untied.generate()) < CLOSE
