"""Bradley and Terry's loss by hand, pair files, and training on pairs with a rule that is quickly learnt."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlx.cli import reward_model
from rlx.cli.reward_model import generated_pairs, new_folder, train_and_save
from rlx.config.errors import ConfigError
from rlx.rewards.preferences import Pair, Recipe, TrainingResult, bradley_terry_loss, hold_out_pairs, read_pairs
from rlx.rewards.reward_model import Exchange, RewardModel, load_classifier
from rlx.storage.claims import ClaimedError

PAIRS = [Pair(prompt=f"{i} + {i * 7 % 10} =", chosen=f"{i}", rejected=f"-{i}") for i in range(96)]
RECIPE = Recipe(epochs=3, batch=16, learning_rate=2e-3, seed=1)


# --- the loss


def test_the_loss_by_hand() -> None:
    chosen = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    rejected = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    expected = (math.log(1 + math.exp(-1)) + math.log(2) + math.log(1 + math.exp(3))) / 3
    assert bradley_terry_loss(chosen, rejected).item() == pytest.approx(expected, abs=1e-9)
    assert bradley_terry_loss(chosen + 5, rejected + 5).item() == pytest.approx(expected, abs=1e-9)


def test_its_gradient_by_hand() -> None:
    chosen = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    bradley_terry_loss(chosen, rejected).backward()
    pulls = [1 / (1 + math.exp(1)) / 2, 1 / (1 + math.exp(-3)) / 2]  # sigmoid(rejected - chosen) / B
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-pull for pull in pulls], abs=1e-9)
    assert rejected.grad.tolist() == pytest.approx(pulls, abs=1e-9)


def test_hopeless_scores_have_a_finite_loss() -> None:
    loss = bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert loss.item() == 2e4


# --- pairs


def test_a_file_gives_its_pairs_in_order(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(pair.model_dump() | {"more": 1}) for pair in PAIRS) + "\n\n")
    assert read_pairs(str(file)) == PAIRS


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(PAIRS[0].model_dump_json(), encoding="utf-8-sig")
    assert read_pairs(str(file)) == PAIRS[:1]


def test_a_pair_of_equal_completions_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    same = Pair(prompt="q", chosen="a", rejected="a")
    file.write_text(f"{PAIRS[0].model_dump_json()}\n{same.model_dump_json()}")
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:2: chosen and rejected are the same text$"):
        read_pairs(str(file))


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("{", ":3: Invalid JSON"),
        ("[1]", ":3: "),
        ('{"prompt": "q", "chosen": "a"}', ":3: rejected: Field required"),
        ('{"prompt": "q", "chosen": "a", "rejected": 3}', ":3: rejected: "),
        ('{"prompt": "", "chosen": "a", "rejected": "b"}', ":3: prompt: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, where: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{PAIRS[0].model_dump_json()}\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read_pairs(str(file))
    assert str(error.value).startswith(f"{file}{where}")
    assert str(error.value).endswith("expected prompt, chosen and rejected")
    assert "\n" not in str(error.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        read_pairs(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl: there are no pairs in it"):
        read_pairs(str(tmp_path / "empty.jsonl"))


def test_generated_pairs_hold_the_answer_and_a_number_near_it() -> None:
    pairs = generated_pairs(0, 300)
    for pair in pairs:
        assert int(pair.chosen) == eval(pair.prompt.partition(": ")[2].removesuffix("="))
        assert 1 <= abs(int(pair.chosen) - int(pair.rejected)) <= 9
    assert len({pair.prompt for pair in pairs}) == len(pairs) > 250
    assert pairs == generated_pairs(0, 300)
    assert pairs[:20] != generated_pairs(1, 300)[:20]


def test_a_prompt_is_never_on_both_sides() -> None:
    again = [*PAIRS, Pair(prompt=PAIRS[0].prompt, chosen="a", rejected="b")]
    training, held_out = hold_out_pairs(again, 10)
    assert held_out == [PAIRS[0], *again[-9:]]
    assert training == PAIRS[1:-8]
    assert hold_out_pairs(PAIRS, 10) == (PAIRS[:-10], PAIRS[-10:])
    with pytest.raises(ConfigError, match="96 pairs are too few to hold 96 out"):
        hold_out_pairs(PAIRS, 96)


@pytest.mark.parametrize(("count", "held"), [(8, 10), (5, 5), (4, 5), (1, 4), (23, 24)])
def test_no_pair_is_lost_where_prompts_have_several(count: int, held: int) -> None:
    """40 pairs on 9 prompts, of which the first 4 have 5 each and the others 4."""
    pairs = [Pair(prompt=f"{i % 9}", chosen=f"{i}", rejected="") for i in range(40)]
    training, held_out = hold_out_pairs(pairs, count)
    assert len(held_out) == held and sorted([*training, *held_out], key=lambda pair: int(pair.chosen)) == pairs
    assert not {pair.prompt for pair in training} & {pair.prompt for pair in held_out}


# --- training


Trained = tuple[Path, TrainingResult, list[dict[str, float]]]


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """(folder, result of the training, metrics of each step)"""
    return train(tiny_model, tmp_path_factory.mktemp("reward") / "first", RECIPE)


def train(base: Path, folder: Path, recipe: Recipe, pairs: Sequence[Pair] = PAIRS) -> Trained:
    reports: list[dict[str, float]] = []
    training, held_out = hold_out_pairs(pairs, 30)

    def report(done: int, metrics: dict[str, float]) -> None:
        reports.append(metrics | {"done": done})

    return folder, train_and_save(str(base), folder, training, held_out, recipe, report), reports


@pytest.mark.slow
def test_training_learns_either_preference(trained: Trained, tiny_model: Path, tmp_path: Path) -> None:
    swapped = [Pair(prompt=pair.prompt, chosen=pair.rejected, rejected=pair.chosen) for pair in PAIRS]
    results = [trained[1], train(tiny_model, tmp_path / "swapped", RECIPE, swapped)[1]]
    assert sum(result.accuracy_before for result in results) == pytest.approx(
        1.0
    )  # the same scores, judged in two ways
    assert [result.accuracy_after for result in results] == [1.0, 1.0]


def test_gradients_that_are_not_finite_end_it_with_nothing_saved(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"step [23]: the gradients are not finite; nothing is saved"):
        train(tiny_model, tmp_path / "spoilt", replace(RECIPE, learning_rate=1e30, warmup=0.0))
    assert not list(tmp_path.iterdir())


def test_training_reports_each_step(trained: Trained) -> None:
    _, result, reports = trained
    assert [report["done"] for report in reports] == list(range(RECIPE.steps(66) + 1)) == list(range(16))
    assert reports[-1]["loss"] < 0.1
    assert reports[0]["held_out_accuracy"] == result.accuracy_before
    assert reports[-1]["held_out_accuracy"] == result.accuracy_after


def test_the_folder_is_a_reward_model(trained: Trained) -> None:
    scorer = RewardModel(str(trained[0]))
    chosen = scorer.score([Exchange(pair.prompt, pair.chosen) for pair in PAIRS])
    rejected = scorer.score([Exchange(pair.prompt, pair.rejected) for pair in PAIRS])
    assert all(c > r for c, r in zip(chosen, rejected, strict=True))
    assert sorted(path.name for path in trained[0].parent.iterdir() if "first" in path.name) == ["first"]


def test_saving_and_loading_keeps_the_scores(trained: Trained, tmp_path: Path) -> None:
    loaded = load_classifier(str(trained[0]))
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    pairs = [Exchange(pair.prompt, pair.chosen) for pair in PAIRS]
    assert RewardModel(str(tmp_path)).score(pairs) == pytest.approx(RewardModel(str(trained[0])).score(pairs), abs=1e-6)


@pytest.mark.slow
def test_the_seed_decides(trained: Trained, tiny_model: Path, tmp_path: Path) -> None:
    first = AutoModelForSequenceClassification.from_pretrained(trained[0]).state_dict()
    short = Recipe(epochs=1, batch=16, learning_rate=2e-3)
    again, _, _ = train(tiny_model, tmp_path / "again", RECIPE)
    other, _, _ = train(tiny_model, tmp_path / "other", short)
    second, third = (
        AutoModelForSequenceClassification.from_pretrained(folder).state_dict() for folder in (again, other)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["score.weight"], third["score.weight"])


def test_training_overwrites_nothing(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists"):
        train(tiny_model, tmp_path / "there", RECIPE)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_failure_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    def fail(done: int, metrics: dict[str, float]) -> None:
        if done == 1:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        train_and_save(str(tiny_model), tmp_path / "new", PAIRS, PAIRS, RECIPE, fail)
    with pytest.raises(ConfigError, match=r"base model .*nowhere: no such folder"):
        train_and_save(str(tmp_path / "nowhere"), tmp_path / "new", PAIRS, PAIRS, RECIPE)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_make_two_models_and_neither_works_for_nothing(tmp_path: Path) -> None:
    out = str(tmp_path / "mine")
    with new_folder(str(tmp_path), None) as first, new_folder(str(tmp_path), None) as second:
        assert [first, second] == [tmp_path / "models" / "reward-1", tmp_path / "models" / "reward-2"]
        second.mkdir()
    with new_folder(str(tmp_path), None) as again:
        assert again == first
    with new_folder(str(tmp_path), out) as mine:
        with pytest.raises(ClaimedError, match="reward model 'mine' is in use by"), new_folder(str(tmp_path), out):
            pass
        mine.mkdir()
    with pytest.raises(ConfigError, match="overwrites nothing"), new_folder(str(tmp_path), out):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "models", "reward-2"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr", "nan"], "expected a number above 0, found 'nan'"),
        (["--lr", "-1"], "expected a number above 0, found '-1'"),
        (["--lr", "inf"], "expected a number above 0, found 'inf'"),
        (["--lr", "fast"], "expected a number above 0, found 'fast'"),
        (["--batch", "0"], "expected a whole number above 0, found '0'"),
    ],
)
def test_options_have_their_values(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reward_model.main(words)
    assert line in capsys.readouterr().err


def test_pairs_in_a_folder_are_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reward_model.main(["--pairs", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: --pairs {tmp_path}: it is a folder, expected a .jsonl file\n"
    assert reward_model.main(["--pairs", f"{tmp_path}/none"]) == 1
    assert "no such file" in capsys.readouterr().err
    assert reward_model.main(["--pairs", "/dev/null", "--storage", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: /dev/null: there are no pairs in it\n"


@pytest.mark.parametrize("base", ["try1@best", "{}/step_000010", "{}"])
def test_a_checkpoint_is_no_base_but_can_be_exported(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step_000010").mkdir()
    (tmp_path / "step_000010" / "manifest.json").touch()
    (tmp_path / "run.json").touch()
    base = base.format(tmp_path)
    assert reward_model.main(["--base", base, "--storage", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: --base {base}: ") and f"rlx export {base} makes" in said
