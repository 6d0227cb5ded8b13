"""What the commands of the time machine print, and the input that they refuse in one line."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_cases import keep, run_of

from rlx.analysis.statistics import Estimate
from rlx.cli import main as rlx
from rlx.cli.arguments import find_sweep_place
from rlx.cli.timemachine import lineage, pairing, replay, running, step_tables, verify, whatif
from rlx.config.errors import ConfigError
from rlx.replay import branches
from rlx.replay.comparing import Compared, Comparison
from rlx.replay.pairs import Paired
from rlx.replay.verifying import Fact
from rlx.samples import gradients
from rlx.storage.addresses import open_storage
from rlx.sweeps.records import SweepPlan

EQUAL = tuple(Compared(step, name, 0.5, 0.5) for step in (4, 5) for name in ("kl/ref", "policy/loss"))
FAULTY = (*EQUAL[:3], Compared(5, "policy/loss", 0.5, math.nextafter(0.5, 1)), Compared(6, "kl/ref", None, 1.0))
STEPS = range(4, 7)


def cells_of(line: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("comparison", "lines"),
    [
        (Comparison(EQUAL, None, None), ["4 metrics of steps 4 to 6 are equal to the last bit"]),
        (
            Comparison(EQUAL, (), True),
            [
                "4 metrics of steps 4 to 6 are equal to the last bit",
                "completions of step 6 are equal: tokens, log-probabilities, ratios, advantages",
                "weights and optimizer state after step 6 are equal, by checksum",
            ],
        ),
        (
            Comparison(FAULTY[:4], None, None, allowed=0.1),
            ["4 metrics of steps 4 to 6 are equal within 0.1: 2.2e-16 at most"],
        ),
        (
            Comparison(EQUAL, None, None, questions={"step_000005-held_out.parquet": ()}),
            [
                "4 metrics of steps 4 to 6 are equal to the last bit",
                "outcomes of questions are equal: 1 evaluation file",
            ],
        ),
        (
            Comparison(EQUAL, None, None, questions={"step_000005-held_out.parquet": ("right", "scores")}),
            [
                "4 metrics of steps 4 to 6 are equal to the last bit",
                "evaluations/step_000005-held_out.parquet differs in right, scores",
            ],
        ),
        (Comparison((), None, None), ["nothing was logged of steps 4 to 6: there is nothing to compare with"]),
    ],
)
def test_what_a_replay_has_shown_in_words(comparison: Comparison, lines: list[str]) -> None:
    assert running.verdict_lines(comparison, STEPS) == lines


def test_the_first_step_that_differs_is_shown_with_every_bit() -> None:
    first, completions, weights, table = running.verdict_lines(Comparison(FAULTY, ("score", "tokens"), False), STEPS)
    assert first == "2 of 5 metrics of steps 4 to 6 differ; the first are of step 5"
    assert completions == "completions of step 6 differ in score, tokens"
    assert weights == "weights and optimizer state after step 6 differ, by checksum"
    row = next(line for line in table.splitlines() if "policy/loss" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "5",
        "policy/loss",
        "0.5",
        "0.5000000000000001",
        "2.2e-16",
    ]
    assert table.splitlines()[-1] == "and 1 more, in this step and later ones"
    within = running.compared_line(Comparison(FAULTY, None, None, allowed=0.01), STEPS)
    assert within == "1 of 5 metrics of steps 4 to 6 differ by more than 0.01; the first are of step 6"


def test_a_missing_value_is_a_dash() -> None:
    table = running.difference_table([Compared(6, "kl/ref", None, 1.0)])
    assert [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")] == ["6", "kl/ref", "-", "1.0", "inf"]


def test_an_opened_step_as_tables(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    keep(run, 5)
    gradients.write_shares(run, 5, {10: -0.25, 11: 1.25})
    text = replay.opened_step(run, 5, None)
    assert text.startswith("step 5 trained on 2 prompts\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[4:]]
    assert rows == [
        ["3", "question 1", "1/2", "0.625", "5", "3 to 4", "2 to 2", "125.0%"],
        ["2", "question 0", "0/2", "0.125", "3", "0 to 0", "2 to 2", "-25.0%"],
    ]
    tokens = replay.opened_step(run, 5, 3).splitlines()[2:]
    assert len(tokens) == 5
    assert [cell.strip() for cell in tokens[0].strip("|").split("|")] == ["0", "c", "-6", "2", "3"]
    assert [cell.strip() for cell in tokens[4].strip("|").split("|")][:2] == ["1", "e"]  # it was not trained on


def test_of_a_long_question_the_end_is_shown() -> None:
    assert step_tables.end_of("short\nquestion") == "short\\nquestion"
    shown = step_tables.end_of("the same words in every question of this kind, and then 3 + 4 - 5 =" * 2)
    assert len(shown) == 60 and shown.startswith("…") and shown.endswith("3 + 4 - 5 =")


def test_the_rows_of_a_pair() -> None:
    row = Paired("held_out", 8, 12, 0.0, 1 / 6, Estimate(1 / 6, 0.25), 2, 0)
    cells = [cell.strip() for cell in pairing.paired_table([row]).splitlines()[-1].strip("|").split("|")]
    assert cells == ["8", "held_out", "12", "0", "0.1667", "+0.167 ± 0.25", "2", "0"]


def test_what_a_control_means(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    control = branches.Branch(run, run.at(10), 16)
    compared = tuple(Compared(step, "kl/ref", 0.5, 0.5) for step in (11, 12))
    (line,) = pairing.control_lines(run, Comparison(compared, None, None), control)
    assert line.startswith("control: 2 metrics of steps 11 to 12 are equal to the last bit: what differs comes from")
    wrong = (compared[0], Compared(12, "kl/ref", 0.5, 0.25))
    line, _ = pairing.control_lines(run, Comparison(wrong, None, None), control)
    assert line.endswith("the first are of step 12: it is not the run")
    (line,) = pairing.control_lines(run, Comparison((), None, None), control)
    assert line == "control: run a has no steps after 10, so there is nothing to compare with"


def test_the_verdict_on_a_record(tmp_path: Path) -> None:
    run, facts = (
        run_of(tmp_path),
        [Fact("torch", "2.1", "2.2", False), Fact("ray", "2", "2", True), Fact("x", "", "", None)],
    )
    good, bad = Comparison(EQUAL, (), None), Comparison(FAULTY, ("score",), False)
    assert verify.record_verdict(run, facts[1:], [good, good]) == "the record of run a holds in 2 steps"
    assert verify.record_verdict(run, facts, [good]) == "the record of run a holds in 1 step; not the same here: torch"
    assert verify.record_verdict(run, facts, [good, bad]) == (
        "the record of run a does NOT hold: 1 of 2 replays differ; not the same here: torch"
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in verify.facts_table(facts).splitlines()[2:]
    ]
    assert [row[-1] for row in rows] == ["NO", "yes", "?"]
    branch = branches.branch_to(run, 12)
    table = verify.steps_table([(branch, good), (branch, bad)]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells == [
        ["12", "step_000010", "4", "0", "0", "equal", "-", "-"],
        ["12", "step_000010", "5", "2", "inf", "DIFFER", "DIFFER", "-"],
    ]


Command = Callable[[list[str]], int]


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        (replay.main, ["b", "--step", "3"], "no run 'b' in"),
        (replay.main, ["a", "--step", "31"], "--step 31: run a has steps 1 to 30"),
        (replay.main, ["a", "--step", "3"], "MLflow at sqlite://"),  # the made-up run is not there
        (verify.main, ["a"], "MLflow at sqlite://"),
        (whatif.main, ["a", "--steps", "3", "--set", "algorithm.clip_high=0.3"], "a: expected RUN@STEP, such as a@10"),
        (whatif.main, ["a@best", "--steps", "3", "--set", "seed=1"], "a@best: expected RUN@STEP, such as a@10"),
        (whatif.main, ["b@best", "--steps", "3", "--set", "seed=1"], "no run 'b' in"),
        (whatif.main, ["b@10", "--steps", "3", "--set", "algorithm.clip_high=0.3"], "no run 'b' in"),
        (whatif.main, ["a@10", "--steps", "3", "--set", "a=b"], "--set a=b: unknown setting a"),
        (
            whatif.main,
            ["a@10", "--steps", "3", "--set", "train.lr=1"],
            "unknown setting train.lr; here it is train.actor_lr",
        ),
        (lineage.main, [], "no sweep"),
    ],
)
def test_bad_input_is_one_line(
    command: Command, words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path)
    assert command([*words, "--storage", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1 and said.startswith("error: ")


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        ("replay", ["a"], "the following arguments are required: --step"),
        ("replay", ["a", "--step", "3", "--gap", "1.5"], "expected a share from 0 to below 1, not '1.5'"),
        ("replay", ["a", "--step", "3", "--gap", "x"], "expected a share from 0 to below 1, not 'x'"),
        ("verify", ["a", "--steps", "0"], "expected a whole number above 0, found '0'"),
        ("replay", ["a@3", "--step", "3"], "a@3 is a checkpoint; give the run: a"),
        ("verify", ["a@best"], "a@best is a checkpoint; give the run: a"),
        ("whatif", ["a@3"], "the following arguments are required: --steps"),
        ("whatif", ["a@3", "--steps", "3", "--set", "a=b", "--gp=3"], "unrecognized arguments: --gp=3; nearest: --gap"),
        ("whatif", ["a@3", "--steps", "3", "--set", "seed=1", "--trials", "3"], "unrecognized arguments: --trials 3 ("),
    ],
)
def test_options_have_their_values(
    command: str, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rlx.main([command, *words])
    assert ended.value.code == 2 and line in capsys.readouterr().err


def test_only_places_may_differ_from_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = running.parser_of("", "")
    running.add_places(parser)
    words = ["--set", "model.path=/my/copy", "--set", "data.source=/my/prompts.jsonl", "--ray-address", "auto"]
    given = {"model.path": "/my/copy", "data.source": "/my/prompts.jsonl", "ray_address": "auto"}
    assert running.moved(parser.parse_args(words)) == given
    with pytest.raises(ValueError, match=r"--set train.actor_lr: only places may differ \(model.path, .*rlx whatif"):
        running.moved(parser.parse_args(["--set", "train.actor_lr=1"]))


@pytest.mark.parametrize(
    ("which", "found"),
    [
        (None, (None, "kept")),
        ("s", ("s", "kept")),
        ("s3://bucket/x/sweeps/s/?region=a", ("s", "s3://bucket/x?region=a")),
        ("file:///x/sweeps/s", ("s", "file:///x")),
        ("/x/sweeps/s/", ("s", "/x")),
        ("x/sweeps/s", ("s", f"{Path.cwd()}/x")),
    ],
)
def test_a_sweep_is_named_by_its_name_folder_or_address(which: str | None, found: tuple[str | None, str]) -> None:
    assert find_sweep_place(which, "kept") == found


@pytest.mark.parametrize("which", ["s3://bucket/x/runs/s", "x/sweeps/s/runs/trial_00000", "x/s"])
def test_an_address_of_something_else_is_no_sweep(which: str) -> None:
    with pytest.raises(ConfigError, match=f"^{which}: expected the name of a sweep, or its address, STORAGE/sweeps/"):
        find_sweep_place(which, "kept")


def test_printed_commands_of_a_lineage_find_its_sweeps(tmp_path: Path) -> None:
    plan = SweepPlan("s", {"tracking": {"uri": "http://host:5000", "experiment": "sums"}}, "space.py", scheduler="pbt")
    *_, line = lineage.rerun_commands(tmp_path, plan, "s3://bucket/x")
    place = "--storage s3://bucket/x --experiment sums --tracking.uri http://host:5000"
    compared = "--against s-constant --metric eval/accuracy --mode max"
    assert line == f"rlx analyze --sweep s-schedule {place} {compared}"


def test_a_lineage_needs_a_population(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweeps" / "s"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text('{"name": "s", "tree": {}, "space": "space.py", "defaults": 2}')
    shutil.copy(Path(__file__).parents[2] / "search_spaces" / "pbt_tiny.py", folder / "space.py")
    assert lineage.main(["--storage", str(tmp_path)]) == 1
    assert "this user did not write sweep 's'" in capsys.readouterr().err
    assert lineage.main(["--storage", str(tmp_path), "--trust"]) == 1
    assert "sweep s had --scheduler none: only settings of pbt change" in capsys.readouterr().err
    assert lineage.main([str(folder)]) == 1
    assert "sweep s had --scheduler none: only settings of pbt change" in capsys.readouterr().err
