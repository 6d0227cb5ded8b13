"""Exit codes, the signals that end a command as Ctrl-C does, hints for options, and who owns a sweep."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_run_folder import put

from rlx.cli import sweep, train
from rlx.cli.options import parse, settings_parser
from rlx.config.errors import ConfigError
from rlx.runs.train_run import RunError
from rlx.storage.addresses import open_storage
from rlx.storage.claims import ClaimedError
from rlx.storage.filesystem import Storage
from rlx.sweeps.records import PLAN_FILE, SweepPlan, plan_content

COMMAND = """
import signal, sys, time
from rlx.cli.options import end_on_signals, exit_code

def command():
    if not {ignored}:  # where the tests run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_on_signals()
    {before}
    try:
        print("ready", flush=True)
        for _ in range(600):  # a signal just before a sleep waits for its end
            time.sleep(0.1)
    except KeyboardInterrupt:
        {cleanup}
        raise KeyboardInterrupt("go on")

sys.exit(exit_code(command))
"""


def start(before: str = "pass", ignored: bool = False, cleanup: str = "pass") -> subprocess.Popen[str]:
    """A command that waits; `ignored`: as under nohup."""
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"] if ignored else []
    command = [*shell, sys.executable, "-c", COMMAND.format(before=before, ignored=ignored, cleanup=cleanup)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_with_its_text_and_code(number: signal.Signals, code: int) -> None:
    process = start()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (code, "interrupted: go on\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_done_at_the_exit_is_done_whatever_comes(number: signal.Signals) -> None:
    """As Ray's shutdown, which takes seconds; it is registered while the command runs."""
    at_exit = "print('begun', flush=True), time.sleep(0.5), print('done', flush=True)"
    process = start(before=f"import atexit; atexit.register(lambda: ({at_exit}))")
    process.send_signal(signal.SIGINT)
    assert process.stdout and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    done, said = process.communicate(timeout=30)
    assert (process.returncode, done, said) == (130, "done\n", "interrupted: go on\n")


@pytest.mark.slow
def test_a_second_interrupt_ends_the_clean_up_of_a_command_without_a_traceback() -> None:
    process = start(cleanup="print('begun', flush=True); time.sleep(60)")
    process.send_signal(signal.SIGINT)
    assert process.stdout and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted\n")


@pytest.mark.slow
def test_a_closed_terminal_does_not_end_what_was_started_with_nohup() -> None:
    process = start(ignored=True)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    process.terminate()
    assert process.wait(timeout=30) == 143


def test_sigterm_while_ray_starts_has_the_code_of_sigterm() -> None:
    """Ray's own handler, which is there until the command replaces it, exits with the signal's number."""
    process = start(before="signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))")
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (143, "interrupted\n")


def test_another_exit_keeps_its_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom rlx.cli.options import exit_code\nexit_code(lambda: sys.exit(7))\n")
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 7


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--lr", "; here it is --train.actor-lr"),
        ("--learning-rate", "; here it is --train.actor-lr"),
        ("--output-dir=x", "; here it is --storage"),
        ("--num-generations", "; here it is --train.samples-per-prompt"),
        ("--kl-coef", "; here it is --algorithm.kl-coef"),
        ("--temperature", "; here it is --rollout.temperature"),
        ("--train.learning-rate", "; here it is --train.actor-lr"),
        ("--lora", "; here it is --model.lora-rank"),
        ("--gpus", "; here it is --scaling.num-workers"),
        ("--wandb", "; here it is --tracking.backends"),
        ("--train.checkpoint-every", "; here it is --checkpoint.every"),
        ("--checkpoint-every", "; here it is --checkpoint.every"),
        ("--train.step", "; nearest: --train.steps"),
        ("--stps", "; nearest: --train.steps"),
        ("--seeed", "; nearest: --seed"),
        ("--timeout", "; nearest: --reward.timeout-s, --rollout.timeout-s, --environment.timeout-s"),
        ("--study-name", "; here it is --name"),
        ("--rust", ""),  # nothing is alike but the dashes
        ("--zzzzzz", ""),
    ],
)
def test_an_option_of_another_library_is_translated(option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(settings_parser("a command", ""), [option, "1"])
    assert str(refused.value) == f"unknown option {option.partition('=')[0]}{hint}"


def test_an_option_with_one_hyphen_is_translated_too() -> None:
    with pytest.raises(ConfigError, match=r"^unexpected argument '-lr'; here it is --train\.actor-lr$"):
        parse(settings_parser("a command", ""), ["-lr", "1e-5"])


def test_a_value_may_begin_with_a_hyphen() -> None:
    parser = settings_parser("", "")
    _, given = parse(parser, ["--reward.answer_pattern", r"-?\d+", "--algorithm.clip-cov-low", "-1", "--name=x"])
    assert given == {"reward.answer_pattern": r"-?\d+", "algorithm.clip_cov_low": -1, "name": "x"}


@pytest.mark.parametrize("name", ["none", "null", "None"])
def test_a_run_may_be_called_none(name: str) -> None:
    _, given = parse(settings_parser("a command", ""), ["--name", name, "--reward.answer-pattern", name])
    assert given == {"name": name, "reward.answer_pattern": None}


def sweep_options(*words: str) -> tuple[Any, dict[str, Any]]:
    """The options of `rlx sweep`, and the given settings."""
    return parse(sweep.argument_parser(), words)


def test_the_name_that_a_search_has_in_optuna_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep_options("--search", "tpe")
    assert "here it is optuna" in capsys.readouterr().err


def test_sweeps_without_a_name_that_start_at_once_get_names_of_their_own(tmp_path: Path) -> None:
    args, given = sweep_options("--trials", "3")
    storage = Storage.local(tmp_path)
    with (
        sweep.claimed_plan(args, storage, {}, given) as (first, restarted),
        sweep.claimed_plan(args, storage, {}, given) as (second, _),
    ):
        assert (first.name, second.name, first.candidates, restarted) == ("sweep-1", "sweep-2", 3, [])
    assert not (storage / "sweeps").names()


def test_a_sweep_is_continued_by_one_at_a_time(tmp_path: Path) -> None:
    storage = Storage.local(tmp_path)
    folder = storage / "sweeps" / "s"
    plan = SweepPlan("s", {"train": {"steps": 3}}, str(tmp_path / "space.py"))
    (folder / "sweep.json").write_text(json.dumps(plan_content(plan)))
    (folder / "space.py").write_text("")
    tree = {"storage": str(tmp_path)}
    args, given = sweep_options("--resume")
    with pytest.raises(ConfigError, match="did not write sweep 's'"), sweep.claimed_plan(args, storage, tree, given):
        pass
    args, given = sweep_options("--resume", "--trust")
    with sweep.claimed_plan(args, storage, tree, given) as (resumed, restarted):
        assert (resumed.name, resumed.config.train.steps, restarted) == ("s", 3, [])
        with (
            pytest.raises(ClaimedError, match="sweep 's' is in use by"),
            sweep.claimed_plan(args, storage, tree, given),
        ):
            pass
    assert folder.names() == ["signature", "space.py", "sweep.json"]


def test_a_sweep_goes_on_where_its_files_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.local(tmp_path)
    folder = storage / "sweeps" / "s"
    plan = SweepPlan("s", {"train": {"steps": 3}, "data": {"source": "/gone/sums.jsonl"}}, str(tmp_path / "space.py"))
    (folder / "sweep.json").write_text(json.dumps(plan_content(plan)))
    (folder / "space.py").write_text("")
    args, given = sweep_options("--resume", "--trust", "--data.source", "sums.jsonl", "--ray-address", "auto")
    sweep.refuse_options(args, given)
    tree = {"storage": str(tmp_path), "ray_address": "auto", "data": {"source": f"{tmp_path}/sums.jsonl"}}
    with sweep.claimed_plan(args, storage, tree, given) as (resumed, _):
        assert (resumed.config.data.source, resumed.config.ray_address) == (f"{tmp_path}/sums.jsonl", "auto")
    tree["data"] = {"source": f"{tmp_path}/others.jsonl"}
    with (
        pytest.raises(ConfigError, match=r"data\.source is /gone/sums\.jsonl in run"),
        sweep.claimed_plan(args, storage, tree, given),
    ):
        pass
    with pytest.raises(
        ConfigError, match=r"only --storage, --ray-address, .*--data\.source, .*--model\.path, .*--trust"
    ):
        sweep.refuse_options(*sweep_options("--resume", "--train.steps", "5"))


@pytest.mark.parametrize(
    "words",
    [
        "--trials 4",
        "--seeds 1",
        "--search random",
        "--scheduler none",
        "--mode max",
        "--reuse engines",
        "--interleave 1",
    ],
)
def test_a_resume_refuses_an_option_of_the_plan_with_any_value(words: str) -> None:
    """It may be the one that a new sweep has without it, and not the one of this sweep."""
    with pytest.raises(ConfigError, match=r"^--resume uses the sweep's own settings: only --storage, "):
        sweep.refuse_options(*sweep_options("--resume", "s", *words.split()))
    sweep.refuse_options(*sweep_options(*words.split()))
    sweep.refuse_options(*sweep_options("--resume", "s", "--storage", "elsewhere", "--trust"))


def test_a_resume_with_more_trials_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"--from-scratch go with it; .* a new sweep with another --seed tries other"):
        sweep.refuse_options(*sweep_options("--resume", "s", "--trials", "8"))
    with pytest.raises(ConfigError, match=r"--restart-errored and --from-scratch go with it$"):
        sweep.refuse_options(*sweep_options("--resume", "s", "--seeds", "8"))


@pytest.mark.parametrize("words", [["--resume", ""], ["--from="], ["--config", ""]])
def test_an_option_with_nothing_in_it_begins_no_new_run(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"^{words[0].strip('=')}: expected a value, found an empty one$"):
        parse(train._argument_parser(), words)


def test_a_sweep_is_resumed_without_a_name_and_has_no_empty_space() -> None:
    assert sweep_options("--resume")[0].resume == ""
    with pytest.raises(ConfigError, match=r"^--space: expected a value"):
        sweep_options("--space", "")


def test_a_sweep_that_is_not_kept_yet_is_not_to_be_resumed(tmp_path: Path) -> None:
    plan, storage = SweepPlan("s", {"storage": str(tmp_path)}, "space.py"), open_storage(str(tmp_path))
    assert sweep.way_on(plan, storage) == "start it again"
    (storage / "sweeps" / "s" / PLAN_FILE).write_text("{}")
    assert sweep.way_on(plan, storage) == f"rlx sweep --resume s --storage {tmp_path} continues the sweep"


def test_a_run_that_ends_early_says_what_a_resume_makes_of_it(tmp_path: Path) -> None:
    folder, resumes = open_storage(str(tmp_path)) / "runs" / "a", f"rlx train --resume a --storage {tmp_path}"

    def said(error: BaseException) -> str:
        with pytest.raises(type(error)) as caught, train._telling(folder, str(tmp_path)):
            raise error
        return str(caught.value)

    assert said(KeyboardInterrupt()) == "the run had not begun"
    for name in ("run.json", "config.yaml"):
        (folder / name).write_text("{}")
    again = f"{resumes} begins it again: it has no checkpoint yet"
    assert said(KeyboardInterrupt()) == again
    assert said(RunError("worker 0: OSError: gone")) == f"worker 0: OSError: gone; {again}"
    (folder / "step_000004" / "rank_00000.safetensors").write_text("never finished")
    assert said(RunError("lost")) == f"lost; {again}"
    refused = "worker 0: ConfigError: model.lora_targets lm_head: tied"  # which no resume can change
    assert said(RunError(refused)) == refused
    put(folder.path, 5)
    newest = f"{resumes} continues the run from its newest checkpoint"
    assert said(RunError("lost")) == f"lost; {newest}"
    refused = "worker 1: ConfigError: model.path /m: it has another model there"  # on a node that has joined since
    assert said(RunError(refused)) == f"{refused}; {newest}"
    (folder / "step_000006" / "manifest.json").write_text('{"format": 999}')
    assert said(RunError("lost")).startswith(f"lost; {resumes} continues the run")
