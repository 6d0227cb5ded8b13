"""Gaps between a record and a replay: metrics, completions and weights, and which fault is the first."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from replay_cases import evaluated, keep, run_of, with_score
from sample_cases import step

from rlx.config.errors import ConfigError
from rlx.replay import comparing, inside_step
from rlx.replay.branches import Branch
from rlx.replay.comparing import Compared, Comparison
from rlx.samples import gradients
from rlx.samples.columns import CompletionFile, Kind, StepCompletions
from rlx.storage.addresses import open_storage
from rlx.types import Episode, Observation, Turn


@pytest.mark.parametrize(
    ("logged", "again", "gap"),
    [
        (0.1, 0.1, 0.0),
        (0.1, math.nextafter(0.1, 1), 1.3877787807814454e-16),  # one bit
        (-2.0, 2.0, 2.0),
        (0.0, -0.0, 0.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, 1.0, math.inf),
        (0.0, 1e-12, 1.0),
        (None, 1.0, math.inf),
        (1.0, None, math.inf),
    ],
)
def test_a_gap_is_relative_to_the_larger_value(logged: float | None, again: float | None, gap: float) -> None:
    assert Compared(1, "m", logged, again).gap == pytest.approx(gap, rel=1e-12)


LOGGED = {
    3: {"policy/loss": 0.5, "time/step": 1.0, "tokens/total": 7.0},
    4: {"policy/loss": 0.25, "tokens/rollout_per_s": 3.0, "memory/peak_gib": 1.0, "best/eval/accuracy": 1.0},
    5: {"policy/loss": 0.125, "eval/accuracy": 0.5, "episode/retries": 0.25},
}


def test_every_metric_is_compared_but_those_that_are_measured() -> None:
    again = {step: dict(metrics) | {"system/cpu": 5.0} for step, metrics in LOGGED.items()}
    compared = comparing.compare_metrics(LOGGED, again, range(3, 6))
    names = [(each.step, each.name) for each in compared]
    assert names == [
        (3, "policy/loss"),
        (3, "tokens/total"),
        (4, "policy/loss"),
        (5, "eval/accuracy"),
        (5, "policy/loss"),
    ]
    assert Comparison(compared, (), True).holds and Comparison(compared, (), True).largest == 0


def test_the_first_fault_is_found() -> None:
    """One bit of a metric in step 4, and all that follows from it in step 5; an evaluation that was not logged."""
    again = {3: LOGGED[3], 4: {"policy/loss": math.nextafter(0.25, 1)}, 5: {"policy/loss": 0.2}}
    comparison = Comparison(comparing.compare_metrics(LOGGED, again, range(3, 6)), None, None)
    found = [(each.step, each.name, each.again) for each in comparison.different]
    assert found == [(4, "policy/loss", math.nextafter(0.25, 1)), (5, "eval/accuracy", None), (5, "policy/loss", 0.2)]
    assert comparison.first_fault == 4 and not comparison.holds
    within = replace(comparison, allowed=0.3)
    assert [(each.step, each.name) for each in within.different] == [(5, "eval/accuracy"), (5, "policy/loss")]


def test_completions_and_weights_count_where_nothing_is_allowed() -> None:
    equal = comparing.compare_metrics(LOGGED, LOGGED, range(3, 6))
    assert not Comparison(equal, ("token_ids",), None).holds
    assert not Comparison(equal, (), False).holds
    assert Comparison(equal, ("token_ids",), False, allowed=0.05).holds  # on a GPU
    assert not Comparison((), None, None).holds  # nothing was compared


def test_columns_of_completions_that_differ_are_named(tmp_path: Path) -> None:
    run, again = (open_storage(str(tmp_path / name)) for name in ("run", "again"))
    assert comparing.different_columns(run, again, 5) is None  # nothing was kept
    keep(run, 5)
    assert comparing.different_columns(run, again, 5) is None
    keep(again, 5)
    assert comparing.different_columns(run, again, 5) == ()
    keep(again, 5, with_score(5, 2, 0.75))
    assert comparing.different_columns(run, again, 5) == ("score",)


def with_episode(began: Observation, reward: float = 0.5, raised_at: str = "") -> StepCompletions:
    """The completions of a step, of which the first is an episode."""
    given = step(5)
    told = Episode(
        began, (Turn(0, 1, 4, Observation(reward=reward)),), (), reward, "raised OSError", raised_at=raised_at
    )
    first = replace(given.rows[0], completion=replace(given.rows[0].completion, episode=told))
    return replace(given, rows=[first, *given.rows[1:]])


def test_what_environments_said_is_compared_but_not_what_it_took(tmp_path: Path) -> None:
    run, again = (open_storage(str(tmp_path / name)) for name in ("run", "again"))
    keep(run, 5, with_episode(Observation(seconds=1.0, retries=1), raised_at="/home/one/env.py:27"))
    for raised_at in ("", "/home/two/env.py:28"):
        keep(again, 5, with_episode(Observation(seconds=2.0), raised_at=raised_at))
        assert comparing.different_columns(run, again, 5) == ()
    for other in (with_episode(Observation(), 0.75), with_episode(Observation(({"role": "user", "content": "a"},)))):
        keep(again, 5, other)
        assert comparing.different_columns(run, again, 5) == ("episode",)
    keep(again, 5)
    assert "episode" in (comparing.different_columns(run, again, 5) or ())


def test_of_some_prompts_only_these_are_compared(tmp_path: Path) -> None:
    """The run has kept one of two prompts, the replay both, and another score of the other."""
    run, again = (open_storage(str(tmp_path / name)) for name in ("run", "again"))
    some = with_score(5, 0, 0.0)
    keep(run, 5, replace(some, rows=some.rows[:2], trained=some.trained and some.trained.rows([0, 1])))
    keep(again, 5, with_score(5, 3, 9.0))
    assert comparing.different_columns(run, again, 5) == ()


def test_a_missing_rank_leaves_nothing_to_compare(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    keep(run, 5)
    whole = run / "completions" / str(CompletionFile(5, Kind.TRAINING, 0, 1))
    (run / "completions" / str(CompletionFile(6, Kind.TRAINING, 0, 2))).write_text("")
    assert whole.exists() and comparing.step_completions(run, 6) is None


def test_weights_are_compared_by_checksum(tmp_path: Path) -> None:
    run, same = run_of(tmp_path, "a"), run_of(tmp_path, "b")
    assert comparing.same_weights(run, same.folder, 10) is True
    assert comparing.same_weights(run, same.folder, 15) is None  # there is no checkpoint
    other = tmp_path / "runs" / "b" / "step_000010" / "manifest.json"
    other.write_text(other.read_text().replace(file_of(run), "0" * 64))
    assert comparing.same_weights(run, same.folder, 10) is None  # a damaged manifest is none
    assert comparing.same_weights(run_of(tmp_path, "c", steps=()), same.folder, 10) is None


def test_a_forged_evaluation_file_is_found(tmp_path: Path) -> None:
    """Of the steps that were done again; the mean over the questions may be as it was logged."""
    run, again = run_of(tmp_path), open_storage(str(tmp_path / "again"))
    for number in (20, 24, 28):
        evaluated(run.folder, number, [True, False, True])
        evaluated(again, number, [True, False, True])
    logged = {step: {"policy/loss": 0.5} for step in range(1, 31)}
    branch = Branch(run, run.checkpoints[-1], 28)

    def compared() -> Comparison:
        return comparing.compare(branch, again, logged, logged, 0.0)

    files = ["step_000024-held_out.parquet", "step_000028-held_out.parquet"]
    assert compared().holds and compared().questions == dict.fromkeys(files, ())
    evaluated(run.folder, 24, [True, True, False])
    assert not compared().holds and compared().forged == {files[0]: ("right",)}
    assert replace(compared(), allowed=0.05).holds  # on a GPU
    (Path(again.path) / "evaluations" / files[1]).unlink()  # what did not come again was made up
    assert "rows" in compared().forged[files[1]]


def test_of_a_source_that_lies_elsewhere_the_name_is_not_compared(tmp_path: Path) -> None:
    run, again = run_of(tmp_path), open_storage(str(tmp_path / "again"))
    evaluated(run.folder, 24, [True, False])
    evaluated(again, 24, [True, False], source="other")
    branch = Branch(run, run.checkpoints[-1], 24)
    moved = replace(branch, changes={"data.source": "other"})
    found = [list(comparing.different_questions(each, again, [24]).values()) for each in (branch, moved)]
    assert found == [[("sources",)], [()]]


def test_of_a_branch_that_goes_beyond_its_run_the_steps_of_the_run_are_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    logged = {29: {"policy/loss": 0.5}, 30: {"policy/loss": 0.25, "eval/accuracy": 1.0}}
    again = {29: {"policy/loss": 0.5}, 30: {"policy/loss": 0.25}, 31: {"policy/loss": 0.2}}
    branch = Branch(run, run.checkpoints[-1], 31)
    compared = comparing.compare(branch, open_storage(str(tmp_path / "x")), logged, again, 0.0)
    assert [each.name for each in compared.different] == ["eval/accuracy"]
    assert [each.step for each in compared.metrics] == [29, 30, 30]


def file_of(run: comparing.RecordedRun) -> str:
    manifest = run.checkpoints[0].manifest
    assert manifest
    return manifest.files["rank_00000.safetensors"].sha256


def test_an_opened_step_has_its_prompts_by_their_share_of_the_gradient(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    keep(run, 5)
    gradients.write_shares(run, 5, {10: -0.25, 11: 1.25})
    eleven, ten = inside_step.step_prompts(run, 5)
    assert (eleven.share, ten.share) == (1.25, -0.25)
    assert [each.sample for each in eleven.completions] == [0, 1]
    assert (ten.index, eleven.index, ten.tokens, eleven.tokens) == (2, 3, 3, 5)
    assert (ten.mean_score, eleven.mean_score, eleven.right) == (0.125, 0.625, 1)
    assert ten.advantages == [0.0]  # of the one completion that the losses have
    assert eleven.advantages == [3.0, 3.5, 4.0] and eleven.ratios == pytest.approx([2.0] * 3)
    assert inside_step.prompt_at([eleven, ten], 2) is ten
    with pytest.raises(ConfigError, match="--prompt 7: the step has the prompts 2, 3"):
        inside_step.prompt_at([eleven, ten], 7)


def test_shares_that_were_not_kept_or_are_damaged(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    keep(run, 5)
    assert [each.share for each in inside_step.step_prompts(run, 5)] == [None, None]
    (run / "gradients" / "step_000005.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"step_000005\.json is damaged"):
        inside_step.step_prompts(run, 5)
    with pytest.raises(ConfigError, match="no completions of step 6"):
        inside_step.step_prompts(run, 6)
