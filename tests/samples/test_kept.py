"""What whole runs keep, in plain processes with fake engines: contents by hand, ranks, shares, resume."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import OnRanks
from test_loop import STEPS, Stopping, trained, unmeasured
from transformers import AutoModelForCausalLM

from rlx.data.prompts import load_tokenizer
from rlx.samples import reader
from rlx.samples.columns import COMPLETIONS, Kind, is_kept
from rlx.samples.reader import KeptCompletion
from rlx.storage.addresses import open_storage

SETTINGS = {
    "algorithm.advantage": "grpo",
    "algorithm.kl_coef": 0.0,
    "model.reference": "none",
    "train.ppo_epochs": 1,
    "train.num_minibatches": 2,
    "rollout.logprobs_every": 2,
    "train.actor_lr": 1e-3,
}
FILTERED = {"algorithm.filter_groups": True, "algorithm.filter_rounds": 6, "rollout.max_tokens": 12}


def named(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as `trained` takes them."""
    return {key.replace(".", "__"): value for key, value in settings.items()}


def keeping(rank: int, ranks: int, path: str, folder: str, settings: dict[str, Any]) -> list[str]:
    """A whole run; what it has said."""
    return trained(path, folder, **named(SETTINGS | settings)).reporter.messages


def stopped_and_resumed(rank: int, ranks: int, path: str, folder: str) -> None:
    """A run with a checkpoint after step 2, of which step 3 was done when it was killed; and what continues it."""
    trained(path, folder, Stopping(), **named(SETTINGS))
    left = Path(folder, COMPLETIONS, "step_000003-00000-of-00003.parquet")  # it ran on three ranks
    left.write_text("of the killed run")
    trained(path, folder, **named(SETTINGS))
    assert not left.exists()


def kept(folder: Path | str) -> dict[tuple[Kind, int], list[KeptCompletion]]:
    run = open_storage(str(folder))
    return {(each.kind, each.number): reader.completions(reader.read(run, each)) for each in reader.kept_steps(run)}


@pytest.fixture(scope="module")
def runs(on_ranks: OnRanks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, on two, with a share of the prompts, and one that was stopped and resumed."""
    folder, model = tmp_path_factory.mktemp("runs"), str(tiny_model)
    for ranks, name, settings in ((1, "one", {}), (2, "two", {}), (1, "half", {"tracking.completions": 0.5})):
        assert on_ranks(ranks, keeping, model, f"{folder}/{name}", settings)[0][1:] == ["first evaluation"]
    on_ranks(1, stopped_and_resumed, model, f"{folder}/resumed")
    return folder


def test_every_completion_of_every_step_is_kept(runs: Path) -> None:
    found = kept(runs / "one")
    assert {number for kind, number in found if kind == Kind.TRAINING} == set(range(1, STEPS + 1))
    assert {number for kind, number in found if kind == Kind.HELD_OUT} == {0, 2, 4}
    for (kind, number), rows in found.items():
        assert len(rows) == (8 if kind == Kind.TRAINING else 3)
        assert {(row.step, row.kind) for row in rows} == {(number, kind)}
    groups = {row.group for (kind, _), rows in found.items() if kind == Kind.TRAINING for row in rows}
    assert len(groups) == 4 * STEPS and {group % 8 for group in groups} == set(range(8))  # two epochs of 8 prompts
    rows = [row for part in found.values() for row in part]
    assert all(row.prompt_index == row.group % 8 for row in rows)
    assert all(row.question == f"{row.prompt_index} + {row.prompt_index}" for row in rows)
    assert all(row.expected == str(2 * row.prompt_index) and row.prompt == row.question for row in rows)


def test_scores_parts_and_finish_by_hand(runs: Path) -> None:
    for rows in kept(runs / "one").values():
        for row in rows:
            assert re.sub(r"<\|\w+\|>", "", "".join(row.tokens)) == row.completion  # without special tokens
            assert len(row.tokens) == len(row.token_ids)
            part = max(-1.0, -abs(len(row.token_ids) - 3) / 3)
            assert row.rewards == {"length": pytest.approx(part, abs=1e-5), "task": 0.0}  # task judges, with weight 0
            assert row.score == row.rewards["length"] and not row.correct
            assert len(row.token_ids) == 6 if row.finish == "length" else row.finish == "stop"
            assert row.staleness == 0 and row.version == row.step - (row.kind == Kind.TRAINING)


def test_log_probabilities_of_engine_and_trainer_by_hand(runs: Path, tiny_model: Path) -> None:
    found = kept(runs / "one")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for row in found[Kind.TRAINING, 1]:  # of the weights that the run began with
        ids = torch.tensor([[*prompt_ids(tiny_model, row.prompt), *row.token_ids]])
        prompt = ids.shape[1] - len(row.token_ids)
        logprobs = model(ids).logits[0].log_softmax(-1)[prompt - 1 : -1]
        expected = logprobs[range(len(row.token_ids)), list(row.token_ids)].tolist()
        assert row.logprobs == pytest.approx(expected, abs=1e-5)
        assert row.engine_logprobs == pytest.approx([-math.log(32)] * len(row.token_ids), abs=1e-5)
        assert row.mismatch == pytest.approx([-math.log(32) - each for each in expected], abs=1e-5)
    assert {row.engine_logprobs for row in found[Kind.TRAINING, 2]} == {None}  # they are asked in every second step
    assert {row.logprobs for row in found[Kind.HELD_OUT, 2]} == {None}


def prompt_ids(model: Path, prompt: str) -> list[int]:
    return list(load_tokenizer(str(model)).encode(prompt))


def test_advantages_and_ratios_by_hand(runs: Path) -> None:
    moved = 0
    for (kind, _), rows in kept(runs / "one").items():
        if kind == Kind.HELD_OUT:
            continue
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            assert (first.group, first.sample, second.sample) == (second.group, 0, 1)
            difference = first.score - second.score  # the deviation of two scores is their distance / sqrt(2)
            expected = difference / 2 / (abs(difference) / math.sqrt(2) + 1e-6)
            assert first.advantages == pytest.approx([expected] * len(first.tokens), abs=1e-5)
            assert second.advantages == pytest.approx([-expected] * len(second.tokens), abs=1e-5)
        ratios = [row.ratios for row in rows]
        assert all(ratio is not None for ratio in ratios)
        still = [ratio for ratio in ratios if ratio == pytest.approx([1.0] * len(ratio or ()), abs=1e-5)]
        assert len(still) >= 4  # the first of two mini-batches is trained on by the old policy
        moved += len(ratios) - len(still)
    assert moved > 0


def test_two_ranks_keep_the_same_rows_as_one(runs: Path) -> None:
    one, two = kept(runs / "one"), kept(runs / "two")
    assert one.keys() == two.keys()
    assert len(list((runs / "two" / COMPLETIONS).iterdir())) == 2 * len(one)
    for key, rows in one.items():
        for mine, other in zip(rows, two[key], strict=True):
            assert exact(mine) == exact(other)
            for name in ("logprobs", "advantages", "ratios"):
                assert getattr(mine, name) == pytest.approx(getattr(other, name), abs=1e-4), (key, name)


def exact(row: KeptCompletion) -> dict[str, Any]:
    """What does not depend on how sums are rounded."""
    return {name: value for name, value in vars(row).items() if name not in ("logprobs", "advantages", "ratios")}


def test_a_share_keeps_whole_prompts_by_seed_and_step(runs: Path) -> None:
    one, half = kept(runs / "one"), kept(runs / "half")
    for (kind, number), rows in one.items():
        step = number if kind == Kind.TRAINING else 0
        assert half[kind, number] == [row for row in rows if is_kept(0.5, 0, step, row.group)]
    assert 0 < sum(map(len, half.values())) < sum(map(len, one.values()))


def test_a_resumed_run_has_kept_what_an_undisturbed_one_has(runs: Path) -> None:
    assert kept(runs / "resumed") == kept(runs / "one")


def test_nothing_is_kept_of_a_share_of_0(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    settings = {"tracking.completions": 0.0, "train.steps": 1}
    on_ranks(1, keeping, str(tiny_model), str(tmp_path / "none"), settings)
    assert not (tmp_path / "none" / COMPLETIONS).exists()
    assert reader.kept_steps(open_storage(str(tmp_path / "none"))) == []


@pytest.mark.slow
def test_what_was_left_out_is_kept_without_numbers_of_training(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    settings = FILTERED | {"algorithm.filter_rounds": 2, "train.steps": 2}
    on_ranks(1, keeping, str(tiny_model), str(tmp_path), settings)
    rows = [row for (kind, _), part in kept(tmp_path).items() if kind == Kind.TRAINING for row in part]
    left_out = [row for row in rows if not row.trained]
    assert sum(row.trained for row in rows) == 16 and left_out
    assert {(row.logprobs, row.ratios, row.advantages) for row in left_out} == {(None, None, None)}
    for row in rows:
        if row.trained:
            scores = {other.score for other in rows if (other.step, other.group) == (row.step, row.group)}
            assert row.advantages is not None and (row.advantages[0] != 0) == (len(scores) > 1)


def filtered(rank: int, ranks: int, path: str, folder: str, steps: int) -> list[dict[str, float]]:
    """A run, or what continues it, that leaves groups out; its metrics that measure neither time nor memory."""
    share = {"data.ptx_batch": 4, "train.prompts_per_step": 8}  # so that each of four ranks has one of each mini-batch
    outcome = trained(path, folder, **named(SETTINGS | FILTERED | share | {"train.steps": steps}))
    return [unmeasured(metrics) for metrics in outcome.reporter.metrics]


@pytest.mark.slow
def test_any_number_of_ranks_generates_and_trains_on_the_same_groups(
    on_ranks: OnRanks, tiny_model: Path, tmp_path: Path
) -> None:
    """Also on a resume, whose steps are those of a run that was not stopped."""
    model, found = str(tiny_model), {}
    for ranks in (1, 2, 4):
        found[ranks], *others = on_ranks(ranks, filtered, model, f"{tmp_path}/{ranks}", 3)
        assert others == [found[ranks]] * (ranks - 1)
    on_ranks(2, filtered, model, f"{tmp_path}/resumed", 2)
    on_ranks(4, filtered, model, f"{tmp_path}/resumed", 3)
    one = kept(tmp_path / "1")
    generated = [metrics["groups/generated"] for metrics in found[1][1:]]
    assert 8 < min(generated) < 48, generated  # every step took several rounds, and some ended before the last
    for ranks, metrics in found.items():
        for mine, other in zip(found[1], metrics, strict=True):
            varying = {"tokens/padding_fraction"}  # it depends on the rows of each rank
            assert mine.keys() == other.keys()
            assert {name for name in mine if mine[name] != pytest.approx(other[name], abs=1e-4)} <= varying, ranks
    for name in ("2", "4", "resumed"):
        rows = kept(tmp_path / name)
        assert rows.keys() == one.keys()
        for key, expected in one.items():
            assert [exact(row) for row in rows[key]] == [exact(row) for row in expected], (name, key)
            advantages = [each for row in rows[key] for each in row.advantages or [math.nan]]
            alone = [each for row in expected for each in row.advantages or [math.nan]]
            assert advantages == pytest.approx(alone, abs=1e-4, nan_ok=True), (name, key)


@pytest.mark.slow
def test_a_critic_that_warms_up_leaves_no_ratio(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    settings = {"algorithm.advantage": "gae", "train.critic_warmup": 1, "train.steps": 2, "eval.every": 0}
    on_ranks(1, keeping, str(tiny_model), str(tmp_path), settings)
    found = kept(tmp_path)
    assert {row.ratios for row in found[Kind.TRAINING, 1]} == {None}
    assert all(row.ratios for row in found[Kind.TRAINING, 2])
