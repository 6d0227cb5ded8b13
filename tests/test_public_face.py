"""What `import rlx` gives, the command `rlx`, and the wheel that both are installed from."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray import tune

import rlx
from rlx.cli import train
from rlx.cli.main import COMMANDS, main
from rlx.config.sections.model import ModelConfig
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_manifest import MANIFEST, Manifest
from rlx.storage.filesystem import Storage

ROOT = Path(__file__).resolve().parent.parent
FACE = [
    "ConfigError",
    "RewardError",
    "RunConfig",
    "RunError",
    "__version__",
    "load_config",
    "load_model",
    "load_sweep",
    "resume",
    "resume_tuner",
    "train",
    "tuner",
]
HEAVY = {"torch", "ray", "vllm", "mlflow", "transformers", "pandas", "pyarrow", "pydantic"}


def imported(code: str) -> set[str]:
    """The libraries that a fresh interpreter has imported after `code`."""
    out = subprocess.check_output([sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], text=True)
    return {name.partition(".")[0] for name in out.split()}


# ---------------------------------------------------------------------------------------------------------------------
# import rlx


def test_the_public_names_are_pinned() -> None:
    assert rlx.__all__ == FACE
    assert set(FACE) <= set(dir(rlx))
    assert all(getattr(rlx, name) for name in FACE)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'rlx' has no attribute 'sweep'"):
        _ = rlx.sweep


@pytest.mark.slow
def test_importing_rlx_imports_no_library() -> None:
    assert imported("import rlx") & HEAVY == set()
    assert imported("import rlx; rlx.load_config(None, {'train.steps': 3})") & (HEAVY - {"pydantic"}) == set()


def test_load_config_reads_a_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  steps: 7\n")
    assert rlx.load_config() == train.new_config(None, {})  # as the commands read it
    assert rlx.load_config(None, {"model.path": "org/name"}) == rlx.RunConfig(model=ModelConfig(path="org/name"))
    assert rlx.load_config(file).train.steps == 7 and rlx.load_config(file).train.actor_lr == 1e-4
    assert rlx.load_config(str(file), {"train.steps": 9, "seed": 3}).train.steps == 9
    with pytest.raises(rlx.ConfigError, match=r"^overrides: unknown setting train\.stepz; nearest: train\.steps"):
        rlx.load_config(file, {"train.stepz": 9})
    with pytest.raises(rlx.ConfigError, match=r"^overrides: train\.steps = 0"):
        rlx.load_config(overrides={"train.steps": 0})
    with pytest.raises(rlx.ConfigError, match=r"the first argument is a file; give settings as overrides="):
        rlx.load_config(cast(Any, {"train.steps": 3}))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"train": {"steps": 3}},
            "train: settings have dotted keys here, such as train.steps: overrides={'train.steps': 3}",
        ),
        ({"train": None}, "train: settings have dotted keys here, such as train.steps"),
        (
            {"tracking": {"uri": "http://me:secret@host"}},
            "tracking: settings have dotted keys here, such as tracking.uri",
        ),
        (["train.steps=3"], 'expected settings by dotted key, such as {"train.steps": 3}, not list'),
        ({3: 4}, 'expected settings by dotted key, such as {"train.steps": 3}; 3 is no key'),
    ],
)
def test_overrides_are_settings_by_dotted_key(overrides: Any, line: str, tmp_path: Path) -> None:
    """A section would replace the whole one of the file, or of the run that is resumed."""
    finished_run(tmp_path, "mine")
    for call in (
        lambda: rlx.load_config(tmp_path / "runs" / "mine" / "config.yaml", overrides=overrides),
        lambda: rlx.resume("mine", storage=str(tmp_path), overrides=overrides),
        lambda: rlx.resume_tuner("mine", storage=str(tmp_path), overrides=overrides),
    ):
        with pytest.raises(rlx.ConfigError, match=f"^overrides: {re.escape(line)}$"):
            call()


def test_a_setting_whose_value_is_a_mapping_is_set_whole_by_its_own_key() -> None:
    """Such as the resources of an engine."""
    whole = {"CPU": 2.0}
    config = rlx.load_config(overrides={"rollout.resources_per_engine": whole})
    assert config.rollout.resources_per_engine == whole


@pytest.mark.parametrize("nothing", [None, 3])
def test_load_model_says_what_it_takes(nothing: Any) -> None:
    with pytest.raises(rlx.ConfigError, match=rf"^load_model: expected a folder, .*, not {type(nothing).__name__}$"):
        rlx.load_model(nothing)


def test_a_value_that_is_refused_is_of_the_file_or_of_what_overrides_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("eval: {every: 2}")
    with pytest.raises(rlx.ConfigError, match=r"^command line: eval\.every = 'none'"):
        train.new_config(str(file), {"eval.every": "none"})
    with pytest.raises(rlx.ConfigError, match=r"^overrides: eval\.every = -1"):
        rlx.load_config(file, {"eval.every": -1})
    alone = {"algorithm.advantage": "grpo", "train.samples_per_prompt": 1}
    with pytest.raises(rlx.ConfigError, match=r"^overrides: algorithm\.advantage grpo compares"):
        rlx.load_config(file, alone)
    file.write_text("algorithm: {advantage: grpo}\ntrain: {samples_per_prompt: 1}")
    with pytest.raises(rlx.ConfigError, match=rf"^{file}: algorithm\.advantage grpo compares"):
        rlx.load_config(file, {"train.steps": 4})
    file.write_text("eval: {every: none}")
    with pytest.raises(rlx.ConfigError, match=rf"^{file}: eval\.every = 'none'"):
        rlx.load_config(file, {"eval.num_prompts": 4})


ENTRY = {"reward.functions.numeric": 1.0}
TWICE = "data: {sources: [{source: z.jsonl}, {source: z.jsonl}]}"


@pytest.mark.parametrize(
    ("text", "overrides", "is_of_file", "line"),
    [
        (TWICE, {"name": "x", "storage": "names"}, True, "data.sources: two are called z: give each a name of its own"),
        ("", {"reward.functions.foo": 1.0}, False, "reward.functions = {'foo': 1.0, 'task': 1.0}: no reward function"),
        ("reward: {functions: {foo: 1.0}}", ENTRY, True, "reward.functions = {'foo': 1.0, 'numeric': 1.0}: no reward"),
        ("", {"reward.functions.url": 1.0}, False, "reward.functions has url, which needs reward.url"),
        ("reward: {functions: {url: 1.0}}", ENTRY, True, "reward.functions has url, which needs reward.url"),
        ("", {"reward.functions.task": 0.0}, False, "reward.functions: at least one must have a weight other than 0"),
        ("", {"reward.functions.task": "x"}, False, "reward.functions.task = 'x': input should be a valid number"),
    ],
)
def test_an_error_is_of_the_overrides_if_it_is_about_what_they_give(
    text: str, overrides: dict[str, Any], is_of_file: bool, line: str, tmp_path: Path
) -> None:
    (file := tmp_path / "run.yaml").write_text(text)
    with pytest.raises(rlx.ConfigError) as refused:
        rlx.load_config(file, overrides)
    assert str(refused.value).startswith(f"{file if is_of_file else 'overrides'}: {line}")


def test_overrides_of_what_was_saved_are_refused_as_theirs(tmp_path: Path) -> None:
    finished_run(tmp_path, "mine")
    checkpoint(open_storage(str(tmp_path)) / "runs" / "mine", 2)
    (tmp_path / "run.yaml").touch()
    given, storage = {"train.steps": "abc"}, str(tmp_path)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("overrides", lambda: rlx.resume("mine", storage=storage, overrides=given)),
        ("command line", lambda: train.resume("mine", {**given, "storage": storage})),
        ("command line", lambda: train.new_config(None, {**given, "storage": storage}, "mine")),
        ("command line", lambda: train.new_config(str(tmp_path / "run.yaml"), given, "mine")),
    ]
    for giver, call in calls:
        with pytest.raises(rlx.ConfigError, match=rf"^{giver}: train\.steps = 'abc': expected a whole number$"):
            call()


def checkpoint(run: Storage, step: int, *, finished: bool = True) -> None:
    """A checkpoint of a run, without tensors; one that is not finished lacks its manifest."""
    empty = ("metrics", "kl", "scores", "cursor", "evaluation", "config", "files")
    content: dict[str, Any] = {field: {} for field in empty}
    folder = run / checkpoint_catalog.checkpoint_name(step)
    checkpoint_catalog.commit(folder, Manifest(rlx="0", step=step, ranks=1, tokens=0, mlflow_run_id=None, **content))
    if not finished:
        (folder / MANIFEST).delete()


def finished_run(storage: Path, name: str) -> None:
    """The files of a run that has done its two steps."""
    folder = open_storage(str(storage)) / "runs" / name
    config = rlx.load_config(None, {"storage": str(storage), "name": name, "train.steps": 2})
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "x"}))
    (folder / "result.json").write_text(json.dumps({"step": 2, "eval/accuracy": 0.25}))


def test_resume_gives_the_result_of_a_finished_run(tmp_path: Path) -> None:
    finished_run(tmp_path, "mine")
    result = rlx.resume("mine", storage=str(tmp_path))
    assert (result.name, result.path, result.checkpoint) == ("mine", f"{tmp_path}/runs/mine", None)
    assert result.metrics == {"step": 2, "eval/accuracy": 0.25}
    checkpoint(open_storage(result.path), 2)
    assert rlx.resume("mine", storage=str(tmp_path)).checkpoint == f"{tmp_path}/runs/mine/step_000002"


def test_runs_that_cannot_begin_or_go_on_are_refused(tmp_path: Path) -> None:
    finished_run(tmp_path, "mine")
    with pytest.raises(rlx.ConfigError, match="no run 'other' in"):
        rlx.resume("other", storage=str(tmp_path))
    with pytest.raises(rlx.ConfigError, match="seed is 0 in run mine"):
        rlx.resume("mine", storage=str(tmp_path), overrides={"seed": 5})
    with pytest.raises(rlx.ConfigError, match="run 'mine' exists"):
        rlx.train(rlx.load_config(None, {"storage": str(tmp_path), "name": "mine"}))


@pytest.mark.parametrize(("config", "kind"), [("nope.yaml", "str"), ({"train": {}}, "dict"), (None, "NoneType")])
def test_what_is_no_config_is_refused(config: Any, kind: str) -> None:
    said = rf"expected what rlx\.load_config\(FILE, overrides=\.\.\.\) returns, not {kind}$"
    with pytest.raises(rlx.ConfigError, match=f"^train: {said}"):
        rlx.train(config)
    with pytest.raises(rlx.ConfigError, match=f"^tuner: {said}"):
        rlx.tuner(config, space=SPACE)


async def late(metrics: object, checkpoint: object) -> None:
    """What nothing awaits."""


class Late:
    """An object whose call nothing awaits."""

    async def __call__(self, metrics: object, checkpoint: object) -> None: ...


@pytest.mark.parametrize(
    ("on_report", "said"),
    [
        (3, ", not int"),
        (lambda: None, ": too many positional arguments"),
        (lambda metrics, checkpoint, step: None, ": missing a required argument: 'step'"),
        (late, ", not an async one: nothing awaits it"),
        (Late(), ", not an async one: nothing awaits it"),
    ],
)
def test_what_cannot_be_called_after_a_step_is_refused_before_a_run_has_its_name(
    on_report: Any, said: str, tmp_path: Path
) -> None:
    line = re.escape(f"on_report: expected a function that takes (metrics, checkpoint){said}")
    with pytest.raises(rlx.ConfigError, match=f"^{line}$"):
        rlx.train(config_at(tmp_path, name="new"), on_report=on_report)
    assert not (tmp_path / "runs").exists()
    finished_run(tmp_path, "mine")
    with pytest.raises(rlx.ConfigError, match=f"^{line}$"):
        rlx.resume("mine", storage=str(tmp_path), on_report=on_report)
    assert rlx.resume("mine", storage=str(tmp_path), on_report=lambda metrics, *more: None).metrics["step"] == 2


@pytest.mark.slow
def test_a_reward_that_fails_before_the_start_leaves_its_details_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_rewards.py").write_text("def f(prompts, completions, answers): return [1 / 0]\n")
    given = {"storage": str(tmp_path), "name": "mine", "reward.functions": {"failing_rewards:f": 1.0}}
    with pytest.raises(rlx.RewardError, match=r"ZeroDivisionError.*; in full in "):
        rlx.train(rlx.load_config(None, given), quiet=True)
    (details,) = (tmp_path / "runs" / "mine").glob("reward_error_*.txt")
    assert "Traceback" in details.read_text()


def test_load_sweep_makes_no_storage(tmp_path: Path) -> None:
    with pytest.raises(rlx.ConfigError, match="no storage folder"):
        rlx.load_sweep(storage=str(tmp_path / "none"))
    with pytest.raises(rlx.ConfigError, match="no MLflow database"):
        rlx.load_sweep(storage=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# rlx.tuner

SPACE = {"train.actor_lr": tune.loguniform(1e-6, 1e-4), "train.ppo_epochs": tune.choice([1, 2])}


def config_at(storage: Path, **overrides: Any) -> rlx.RunConfig:
    return rlx.load_config(None, {"storage": str(storage), "train.steps": 3} | overrides)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"space": {"train.actor_rl": 1}}, "unknown setting train.actor_rl; nearest: train.actor_lr"),
        ({"space": lambda: SPACE}, ": give domains by dotted key, or a Python file with"),
        ({"search": "magic"}, "search 'magic': Input should be 'random', 'grid'"),
        ({"scheduler": "magic"}, "scheduler 'magic': Input should be 'none', 'asha'"),
        ({"trials": 0}, "trials 0: Input should be greater than 0"),
        ({"max_concurrent": 0}, "max_concurrent 0: Input should be greater than 0"),
        ({"interleave": 0}, "interleave 0: at least 1"),
        ({"interleave": 2}, "--interleave 2: runs use no GPU"),
        ({"trails": 3}, "no option 'trails'; nearest: trials"),
        ({"param_space": {}}, "no option 'param_space': it is called space"),
        ({"num_samples": 3}, "no option 'num_samples': it is called trials"),
        ({"callbacks": []}, "no option 'callbacks': MLflow has every number"),
        ({"scheduler": object()}, "scheduler: it takes a name, see `rlx sweep --help`, not a value of object"),
        ({"space": {"seed": tune.choice([1, 2])}, "seeds": 2}, "varies the seed already"),
    ],
)
def test_a_tuner_refuses_what_cannot_run(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(rlx.ConfigError) as error:
        rlx.tuner(config_at(tmp_path), **{"space": SPACE, **options})
    assert line in str(error.value)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]  # a refused call leaves nothing behind


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"tracking.uri": "http://127.0.0.1:9"}, "tracking.uri http://127.0.0.1:9: no server answers there"),
        ({"checkpoint.init_from": "{here}"}, "checkpoint {here} is not complete"),
        ({"data.source": "{here}/none.jsonl"}, "{here}/none.jsonl"),
    ],
)
def test_what_a_start_needs_is_checked_before_a_cluster_is_started(
    given: dict[str, str], line: str, tmp_path: Path
) -> None:
    given = {key: value.format(here=tmp_path) for key, value in given.items()}
    was_running = ray.is_initialized()
    with pytest.raises(rlx.ConfigError) as error:
        rlx.tuner(config_at(tmp_path, **given), space=SPACE)
    assert line.format(here=tmp_path) in str(error.value)
    with pytest.raises(rlx.ConfigError) as error:
        rlx.train(config_at(tmp_path, **given), quiet=True)
    assert line.format(here=tmp_path) in str(error.value) and ray.is_initialized() == was_running


def test_a_checkpoint_of_ray_that_is_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rlx.ConfigError, match="is not complete"):
        rlx.load_model(tune.Checkpoint(str(tmp_path)))
    (tmp_path / "pointer.json").write_text("{}")
    with pytest.raises(rlx.ConfigError, match="is damaged"):
        rlx.load_model(tune.Checkpoint(str(tmp_path)))


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps this process's own name."""
    monkeypatch.setattr(sys, "argv", ["rlx"])


@pytest.mark.parametrize("words", [["--version"], ["--help"], []])
def test_help_and_version_import_nothing_slow(words: list[str]) -> None:
    code = (
        f"from rlx.cli.main import main\ntry:\n    main({words})\nexcept SystemExit as end:\n    assert end.code == 0"
    )
    assert imported(code) & HEAVY == set()


def test_the_command_tells_its_version_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"rlx {rlx.__version__}\n"
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    names = ["train", "sweep", "analyze", "samples", "checkpoints", "replay", "whatif", "verify", "lineage"]
    names += ["export", "reward-model", "doctor"]
    assert list(COMMANDS) == names


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["resume", "try1"], "; here it is rlx train --resume try1"),
        (["list"], "; here it is rlx checkpoints"),
        (["exprt", "try1"], "; nearest: export"),
        (["frob"], f"; there are {', '.join(COMMANDS)}"),
    ],
)
def test_a_command_that_there_is_not(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err == f"error: there is no command {words[0]}{hint}\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rlx", "rlx.cli.main"])
def test_the_command_runs_as_a_module_of_python(module: str) -> None:
    def ran(*words: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert ran("--version") == (0, f"rlx {rlx.__version__}\n", "")
    assert ran("train", "--train.step", "4") == (1, "", "error: unknown option --train.step; nearest: --train.steps\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_own_help(command: str, program: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rlx {command} ")


def test_the_doctor_offers_settings_and_no_options_of_train(program: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--config FILE", "--train.actor-lr"))
    assert not any(option in shown for option in ("--resume NAME", "--from CHECKPOINT", "--check "))


def test_commands_return_the_exit_codes_of_the_scripts(
    program: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--train.step", "4"]) == 1
    assert capsys.readouterr().err == "error: unknown option --train.step; nearest: --train.steps\n"
    assert main(["doctor", "--resume", "mine"]) == 1
    assert capsys.readouterr().err.startswith("error: unknown option --resume")
    assert main(["train", "--check"]) == 1
    assert capsys.readouterr().err.startswith("error: unknown option --check")
    assert main(["checkpoints", "--storage", str(tmp_path)]) == 0
    with pytest.raises(SystemExit) as end:
        main(["frob"])
    assert end.value.code == 2


# ---------------------------------------------------------------------------------------------------------------------
# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source, unpacked; built from a copy, in which setuptools leaves its files."""
    source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "built", "unpacked"))
    for name in ("pyproject.toml", "README.md", "rlx"):
        (source / name).symlink_to(ROOT / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(built)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (file,) = built.glob("*.whl")
    zipfile.ZipFile(file).extractall(unpacked)
    return unpacked


def files_of(folder: Path) -> set[str]:
    files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    return {file for file in files if "__pycache__" not in file}


def test_the_wheel_has_every_file_of_rlx(wheel: Path) -> None:
    assert files_of(wheel / "rlx") == files_of(ROOT / "rlx")
    (entry_points,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "rlx = rlx.cli.main:main" in entry_points.read_text()


@pytest.mark.slow
def test_an_installed_rlx_finds_its_defaults(wheel: Path, tmp_path: Path) -> None:
    code = (
        "from rlx.cli.sweep import DEFAULT_SETTINGS, ModelConfig, default_space; from rlx.config import experiment\n"
        "models = (ModelConfig(), ModelConfig(path='m'), ModelConfig(path='m', lora_rank=4))\n"
        "print(experiment.EXPERIMENT_FILE, DEFAULT_SETTINGS, *map(default_space, models), "
        "*(default_space(model, 'pbt') for model in models))"
    )
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert all(Path(file).is_file() and Path(file).is_relative_to(wheel) for file in out.split())
    links = ["experiments/configs/arithmetic.yaml", "experiments/configs/sweep.yaml"]
    links += [f"search_spaces/{name}.py" for name in ("ppo_tiny", "ppo", "ppo_lora", "pbt_tiny", "pbt", "pbt_lora")]
    for file, link in zip(out.split(), links, strict=True):
        assert Path(file).read_text() == (ROOT / link).read_text()


def test_a_sweep_stays_where_it_is(tmp_path: Path) -> None:
    sweep = tmp_path / "sweeps" / "s"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    with pytest.raises(rlx.ConfigError) as refused:
        rlx.resume_tuner("s", storage=str(tmp_path), overrides={"storage": "elsewhere"})
    assert str(refused.value) == f"storage elsewhere: sweep 's' stays where it is, which is looked for in {tmp_path}"
