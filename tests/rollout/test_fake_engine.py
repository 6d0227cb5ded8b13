"""Engines without a model: what they answer, the weights they take, and the errors of a real engine."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from test_engine import SINGLE

from rlx.rollout.base import Engine, Engines, Output, PendingRollout, Request, request_seed
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.fake_engine import FakeEngine, FakeEngines, uniform_output
from rlx.rollout.weight_sync.buckets import layout, pack
from rlx.rollout.weight_sync.sync import WeightSync
from rlx.types import Completion, Prompt, Sampling, ShardedWeight, WeightSyncError

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=5, stop_token_ids=(1,))
PROMPTS = [Prompt(3, (7, 8), "question", "answer"), Prompt(4, (9,), "question", "answer")]


def echo(request: Request) -> Output:
    """The prompt backwards, as far as it may go."""
    tokens = request.prompt[::-1][: request.sampling.max_tokens]
    return Output(tokens, (-0.5,) * len(tokens), len(tokens) == len(request.prompt))


def weights() -> list[ShardedWeight]:
    return [ShardedWeight("a", (3,), (torch.tensor([1.0, 2.0, 3.0]),)), ShardedWeight("b", (), (torch.tensor(4.0),))]


def test_completions_depend_on_seed_and_prompt_alone() -> None:
    outputs = [uniform_output(Request((2, 3), seed, SAMPLING), vocab_size=8) for seed in range(50)]
    assert outputs == [uniform_output(Request((2, 3), seed, SAMPLING), vocab_size=8) for seed in range(50)]
    assert len({output.token_ids for output in outputs}) > 40
    assert outputs[0] != uniform_output(Request((2, 4), 0, SAMPLING), vocab_size=8)
    greedy = {uniform_output(Request((2, 3), seed, SAMPLING.greedy)) for seed in range(5)}
    assert len(greedy) == 1


def test_a_stop_token_ends_a_completion_and_nothing_else_but_its_length() -> None:
    outputs = [uniform_output(Request((2,), seed, SAMPLING), vocab_size=4) for seed in range(200)]
    for output in outputs:
        assert output.finished == (output.token_ids[-1] == 1)
        assert 1 not in output.token_ids[:-1]
        assert output.finished or len(output.token_ids) == 5
        assert output.logprobs == (-math.log(4),) * len(output.token_ids)
        assert all(0 <= token < 4 for token in output.token_ids)
    # Five draws of four tokens without the stop token: 0.75 ** 5 = 0.24.
    assert 0.1 < np.mean([not output.finished for output in outputs]) < 0.4


def letters(tokens: Sequence[int]) -> str:
    return "".join("abcd"[token] for token in tokens)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it() -> None:
    sampling = replace(SAMPLING, stop_token_ids=(), max_tokens=12)
    for seed in range(50):
        request = Request((2,), seed, sampling)
        whole = uniform_output(request, 4)
        output = uniform_output(replace(request, sampling=replace(sampling, stop=("ab", "dd"))), 4, letters)
        text = letters(output.token_ids)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert output.finished == text.endswith(("ab", "dd"))
        assert output.finished or len(text) == 12
        assert "ab" not in text[:-1] and "dd" not in text[:-1]
    with pytest.raises(ValueError, match="stop strings need the argument `decode`"):
        uniform_output(Request((2,), 0, replace(sampling, stop=("a",))), 4)


def test_nothing_ends_a_completion_before_its_shortest_length() -> None:
    sampling = replace(SAMPLING, min_tokens=3, stop=("b",))
    for seed in range(50):
        output = uniform_output(Request((2,), seed, sampling), 4, letters)
        assert 1 not in output.token_ids[:3] and 4 <= len(output.token_ids) <= 5  # token 1 is the letter b
        assert output.logprobs[:3] == (-math.log(3),) * 3 and output.logprobs[3] == -math.log(4)


def test_engines_in_this_process_answer_by_hand() -> None:
    engines: Engines = FakeEngines(echo)
    engines.push(7, starting=True)
    pending = engines.begin(PROMPTS, [SAMPLING, SAMPLING.greedy], 7)
    assert not pending.is_complete and pending.completions == []
    long, short = (8, 7), (9,)
    assert engines.finish(pending, 7) == [
        Completion(PROMPTS[0], 0, long, (-0.5, -0.5), True, 7),
        Completion(PROMPTS[0], 1, long, (-0.5, -0.5), True, 7),
        Completion(PROMPTS[1], 0, short, (-0.5,), True, 7),
        Completion(PROMPTS[1], 1, short, (-0.5,), True, 7),
    ]
    assert pending.is_complete


def test_a_rollout_that_is_begun_ahead_keeps_its_version_and_seeds() -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Output:
        asked.append(request)
        return echo(request)

    engines = FakeEngines(answer, seed=5)
    engines.push(1)
    pending = engines.begin(PROMPTS[:1], [SAMPLING] * 2, 1)
    engines.push(2)
    assert engines.wait(pending, 2)
    assert [completion.version for completion in engines.finish(pending, 2)] == [1, 1]
    assert [request.seed for request in asked] == [request_seed(5, 1, 3, 0), request_seed(5, 1, 3, 1)]
    assert engines.pushed == [1, 2]


def test_engines_refuse_a_version_that_they_do_not_hold() -> None:
    engines = FakeEngines(echo)
    with pytest.raises(WeightSyncError, match="version 0 but the engines hold version None"):
        engines.begin(PROMPTS, [SAMPLING], 0)
    engines.push(0)
    with pytest.raises(WeightSyncError, match="version 1 but the engines hold version 0"):
        engines.finish(engines.begin(PROMPTS, [SAMPLING], 0), 1)
    engines.sleep()
    with pytest.raises(WeightSyncError, match="version 0 but the engines hold version None"):
        engines.begin(PROMPTS, [SAMPLING], 0)
    engines.push(1)
    engines.begin(PROMPTS, [SAMPLING], 1)
    engines.close()
    assert engines.is_closed


def test_one_engine_takes_weights_in_buckets_and_then_answers() -> None:
    engine = FakeEngine(echo)
    fake: Engine = engine
    buckets = [pack(layout([weight], torch.float32), [part for part in weight.parts]) for weight in weights()]
    fake.start_update("first", 2, 10.0)
    fake.receive("first", buckets[0])
    with pytest.raises(WeightSyncError, match="1 tensors missing"):
        fake.finish_update("first", 1)
    fake.receive("another", buckets[1])  # of an update that has ended: dropped
    fake.receive("first", buckets[1])
    fake.finish_update("first", 1)
    assert {name: tensor.tolist() for name, tensor in engine.weights.items()} == {"a": [1.0, 2.0, 3.0], "b": 4.0}
    assert fake.generate([Request((5, 6), 0, SAMPLING)], 1) == ([Output((6, 5), (-0.5, -0.5), True)], 0.0)
    with pytest.raises(WeightSyncError, match="version 2 but holds version 1"):
        fake.generate([], 2)
    buckets[0].data[0] ^= 1
    fake.start_update("second", 2, 10.0)
    with pytest.raises(WeightSyncError, match="checksum"):
        fake.receive("second", buckets[0])
    fake.sleep()
    assert engine.is_asleep
    with pytest.raises(WeightSyncError, match="through the object store only"):
        fake.update(None, 3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_as_actors_they_work_with_the_pool_and_the_weight_sync(ray_cluster: None) -> None:
    actors = [ray.remote(FakeEngine).options(num_cpus=0).remote() for _ in range(2)]
    pool = EnginePool(actors, seed=0)
    sync = WeightSync(actors, SINGLE, torch.device("cpu"), torch.float32, None)
    assert sync.push(weights(), 3, pool.probe(60)) == {}
    pending: PendingRollout = pool.begin(PROMPTS, [SAMPLING], 3)
    pool.finish(pending, 3)
    assert pool.lost == {}
    expected = [uniform_output(pending.requests(i, 0)[0]).token_ids for i in range(2)]
    assert [completion.token_ids for completion in pending.completions] == expected
    for actor in actors:
        ray.kill(actor)
