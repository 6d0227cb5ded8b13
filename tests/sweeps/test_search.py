"""Search spaces, and the settings that each search draws from them."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from ray import tune
from ray.tune.search import Searcher

from rlx.cli import sweep
from rlx.config.errors import ConfigError
from rlx.config.sweep import DEFAULT_METRIC, SchedulerName, SearchName
from rlx.sweeps.schedulers.by_name import SCHEDULERS
from rlx.sweeps.searchers import ADAPTIVE, SEARCHES, ListSearch, searcher
from rlx.sweeps.space import complete_settings, extremes, load_space, may_have

SHIPPED = Path(__file__).resolve().parents[2] / "search_spaces"
RANGES = {"train.actor_lr": tune.loguniform(1e-5, 1e-3), "algorithm.gae_lambda": tune.uniform(0.0, 1.0)}
CHOICES = {"train.ppo_epochs": tune.choice([1, 2, 4]), "algorithm.gae_lambda": tune.choice([0.9, 1.0])}


def space_file(folder: Path, body: str) -> str:
    path = folder / "space.py"
    path.write_text(f"from ray import tune\n\ndef space():\n    return {body}\n")
    return str(path)


def suggestions(search: Searcher, count: int) -> list[Any]:
    return [search.suggest(str(i)) for i in range(count)]


def test_a_grid_that_nothing_is_sampled_beside_is_tried_once() -> None:
    lists = {"train.ppo_epochs": tune.grid_search([1, 2]), "train.actor_lr": 1e-4}
    assert len(searcher("random", lists, 4, 0).candidates) == 2  # type: ignore[attr-defined]
    sampled = lists | {"algorithm.gae_lambda": tune.uniform(0.0, 1.0)}
    assert len(searcher("random", sampled, 4, 0).candidates) == 8  # type: ignore[attr-defined]


def fitting(name: str) -> dict[str, Any]:
    return CHOICES if name == "grid" else RANGES


# ---------------------------------------------------------------------------------------------------------------------
# Spaces


def test_a_space_is_read(tmp_path: Path) -> None:
    path = space_file(
        tmp_path, "{'train.ppo_epochs': tune.choice([1, 2]), 'train.actor_lr': tune.loguniform(1e-5, 1e-3)}"
    )
    assert list(load_space(path, {})) == ["train.ppo_epochs", "train.actor_lr"]
    assert load_space(space_file(tmp_path, "{'train.ppo_epochs': tune.quniform(1, 3, 1)}"), {})  # 1.0, 2.0, 3.0


def test_the_values_of_a_space_that_all_trials_have_count_for_the_others(tmp_path: Path) -> None:
    space = "{'algorithm.advantage': tune.choice(['gae', 'grpo']), 'train.samples_per_prompt': 4}"
    assert len(load_space(space_file(tmp_path, space), {"train": {"samples_per_prompt": 1}})) == 2
    with pytest.raises(ConfigError, match=r"train\.samples_per_prompt is 1, at least 2 are needed"):
        load_space(space_file(tmp_path, space.replace(": 4", ": 1")), {"train": {"samples_per_prompt": 8}})


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.py")), ids=lambda path: path.stem)
def test_a_shipped_space_fits_its_search(path: Path) -> None:
    space = load_space(str(path), {})
    grid, all_three = ["grid"], ["random", "grid", "optuna"]
    own = {"estimators": grid, "ppo_grid": grid, "ppo_grid_tiny": grid, "clipping": all_three}
    for name in own.get(path.stem, ["random", "optuna", "hyperopt"]):
        assert set(searcher(name, space, 1, 0).suggest("0")) == set(space)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("{'train.actor_rl': tune.choice([1])}", "unknown setting train.actor_rl; nearest: train.actor_lr"),
        ("{'train': {'epochs': tune.choice([1])}}", "train: settings have dotted keys here, such as train.steps"),
        ("{1: tune.choice([1])}", "unknown setting 1"),
        ("{'train.ppo_epochs': tune.choice([1, 0])}", "train.ppo_epochs = 0: input should be greater than 0"),
        ("{'train.ppo_epochs': tune.grid_search([2, -1])}", "train.ppo_epochs = -1: input should be greater than 0"),
        ("{'train.ppo_epochs': tune.randint(0, 3)}", "train.ppo_epochs = 0: input should be greater than 0"),
        (
            "{'algorithm.gae_lambda': tune.uniform(0.5, 1.5)}",
            "algorithm.gae_lambda = 1.5: input should be less than or equal to 1",
        ),
        (
            "{'algorithm.gae_lambda': tune.randn(0.5, 0.1)}",
            "algorithm.gae_lambda: a normal distribution has no ends to check: use tune.uniform",
        ),
        ("{'train.prompts_per_step': 7}", "train.prompts_per_step (7) must be a multiple of"),
        ("{'train.ppo_epochs': tune.choice([])}", "train.ppo_epochs has no values to choose from"),
        ("{'train.ppo_epochs': tune.grid_search([])}", "train.ppo_epochs has no values to choose from"),
        ("{'train.ppo_epochs': tune.grid_search(3)}", "train.ppo_epochs: grid_search takes a list of values, not 3"),
        ("{'train.ppo_epochs': tune.grid_search(iter([1]))}", "grid_search takes a list of values, not <list_iterator"),
        (
            "{'train.ppo_epochs': tune.randint(1, 10**25)}",
            "train.ppo_epochs: a range of whole numbers lies between -2**63 and 2**63",
        ),
        ("{'seed': tune.lograndint(1, 10**400)}", "seed: a range of whole numbers lies between -2**63 and 2**63"),
        (
            "{'train.actor_lr': tune.loguniform(1e-3, 1e-5)}",
            "train.actor_lr has no values to choose from between 0.001 and 1e-05; the lower end comes first: 1e-05",
        ),
        ("{'algorithm.kl_coef': tune.quniform(.5, .1, .1)}", "algorithm.kl_coef has no values to choose from between"),
        ("{'algorithm.kl_coef': tune.uniform(.1, .1)}", "between 0.1 and 0.1; the value alone stands for itself: 0.1"),
        ("{'train.ppo_epochs': tune.uniform(1, 3)}", "a fractional part; tune.randint(1, 4) has whole numbers"),
        ("{'train.ppo_epochs': tune.uniform(500, 5000)}", "train.ppo_epochs = 500.3: input should be a valid integer"),
        ("{'train.ppo_epochs': tune.loguniform(1, 8)}", "a fractional part; tune.lograndint(1, 9) has whole numbers"),
        ("{'train.ppo_epochs': tune.quniform(1, 3, 0.5)}", "train.ppo_epochs = 1.5: input should be a valid integer"),
        ("{'train.ppo_epochs': tune.randint(2, 2)}", "between 2 and 2; the value alone stands for itself: 2"),
        ("{'train.ppo_epochs': tune.qrandint(4, 2, 2)}", "between 4 and 2; the lower end comes first: 2, 4"),
        ("{'train.ppo_epochs': tune.qrandint(5, 7, 4)}", "between 5 and 7: no multiple of 4 is there"),
        (
            "{'train.ppo_epochs': tune.sample_from(lambda spec: spec.config.x)}",
            "tune.sample_from hides its values",
        ),
        (
            "{'rollout.num_engines': tune.choice([1, 2])}",
            "rollout.num_engines changes the resources of a trial",
        ),
        ("{'scaling.num_workers': 2}", "scaling.num_workers changes the resources of a trial"),
        ("{'reward.model_replicas': 2}", "reward.model_replicas changes the resources of a trial"),
        ("{}", "space() returned dict {}, expected settings to vary, as {"),
        ("None", "space() returned NoneType None, expected settings to vary, as {"),
        ("[{'train.actor_lr': 1.0}]", "space() returned list [{'train.actor_lr': 1.0}], expected settings to vary"),
        ("1 / 0", ":4: ZeroDivisionError: division by zero"),
    ],
)
def test_a_space_that_does_not_fit_the_config_is_refused(body: str, line: str, tmp_path: Path) -> None:
    path = space_file(tmp_path, body)
    with pytest.raises(ConfigError) as error:
        load_space(path, {})
    assert str(error.value).startswith(f"--space {path}:") and line in str(error.value)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("{'train.actor_lr': float((Path(__file__).parent / 'rate.txt').read_text())}", ":8: FileNotFoundError: "),
        (
            "{'train.actor_lr': __import__('rate_beside').RATE}",
            ":8: ModuleNotFoundError: No module named 'rate_beside'",
        ),
        ("{'data.source': tune.choice([str(Path(__file__).with_name('a.jsonl'))])}", ": data.source has paths in"),
    ],
)
def test_a_space_that_a_resume_could_not_read_is_refused_at_once(
    body: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume has a copy of it, without what lies beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rate.txt").write_text("1e-4")
    (tmp_path / "rate_beside.py").write_text("RATE = 1e-4")
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom pathlib import Path\n\nfrom ray import tune\n\nsys.path.append(str(Path(__file__).parent))\n"
        f"def space():\n    return {body}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_space(str(tmp_path / "mine.py"), {})
    told = str(error.value)
    assert told.startswith(f"--space {tmp_path}/mine.py{line}") and "rlx-space" not in told
    assert told.endswith(
        "; a resume has a copy of this file alone: write in it what it reads or imports, and paths in full"
    )


def test_a_space_must_be_a_python_file_with_the_function(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.py: no such file"):
        load_space(str(tmp_path / "none.py"), {})
    for name, text, line in (
        ("other.py", "x = 1\n", "no function space"),
        ("wrong.py", "def space(:\n", "SyntaxError: "),
        ("space.txt", "def space(): ...\n", "not a Python file"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name}: {line}"):
            load_space(str(tmp_path / name), {})


def test_a_value_is_checked_together_with_the_rest_of_the_config(tmp_path: Path) -> None:
    path = space_file(tmp_path, "{'train.prompts_per_step': tune.choice([4, 8])}")
    assert list(load_space(path, {})) == ["train.prompts_per_step"]
    with pytest.raises(ConfigError, match=r"train.prompts_per_step \(4\) must be a multiple of"):
        load_space(path, {"scaling": {"num_workers": 8}})


def test_a_range_is_checked_at_its_ends() -> None:
    assert extremes(tune.uniform(0.1, 0.7)) == [0.1, 0.7]
    assert extremes(tune.randint(2, 5)) == [2, 4]
    assert extremes(tune.qrandint(2, 6, 2)) == [2, 6]
    assert extremes(tune.choice(["a", None])) == ["a", None]
    assert extremes(tune.grid_search([1, 2])) == [1, 2]
    assert extremes(0.3) == [0.3]


@pytest.mark.parametrize(
    ("domain", "held", "strange"),
    [
        (tune.uniform(1, 8), [1, 3.25, 8.0], [0.5, 8.1, math.nan, "3.25", None]),
        (tune.loguniform(1e-3, 1.0), [0.02], [2.0]),
        (tune.quniform(0.0, 1.0, 0.25), [0.5], [-0.25]),
        (tune.randint(2, 5), [3, 4], [5]),
        (tune.qrandint(2, 6, 2), [4, 6], [8]),
        (tune.choice([({"name": "a", "tags": ("x", "y")},), None]), [[{"name": "a", "tags": ["x", "y"]}], None], [[]]),
        (tune.choice([np.int64(3), 5]), [3, 5], [4]),
        (tune.grid_search([(1, 2)]), [[1, 2], (1, 2)], [[2, 1]]),
        (("one", "two"), [["one", "two"]], ["one"]),
    ],
)
def test_what_a_record_says_is_compared_with_the_whole_domain(domain: Any, held: list[Any], strange: list[Any]) -> None:
    assert all(may_have(domain, json.loads(json.dumps(value))) for value in held)
    assert not any(may_have(domain, value) for value in strange)


def test_a_trials_settings_are_what_was_drawn_to_four_digits_and_the_constants() -> None:
    space = {
        "train.ppo_epochs": 2,
        "algorithm.gae_lambda": tune.choice([0.98765]),
        "train.actor_lr": tune.loguniform(1e-5, 1),
    }
    drawn = {"train.actor_lr": np.float64(0.000123456), "algorithm.gae_lambda": 0.98765}
    assert complete_settings(space, drawn) == {
        "train.ppo_epochs": 2,
        "train.actor_lr": 0.0001235,
        "algorithm.gae_lambda": 0.98765,
    }


@pytest.mark.parametrize(
    ("domain", "drawn", "given"),
    [
        (tune.uniform(0.99991, 0.99999), [0.99993456, 0.9999, 1.0], [0.9999346, 0.99991, 0.99999]),
        (tune.loguniform(0.9995, 0.9999), [0.99971234], [0.999712]),
        (tune.uniform(-0.00001, 0.99999), [0.00012345, 0.87654321], [0.0001234, 0.8765]),
        (tune.uniform(1.1, 1.2), [1.12345], [1.123]),
        (tune.quniform(0.99991, 0.99999, 0.00001), [0.999934], [0.99993]),
        (tune.quniform(0.0, 1.0, 0.1), [0.31, 0.69], [0.3, 0.7]),
        (tune.quniform(0, 30_000, 0.5), [12_345.6], [12_345.5]),
    ],
)
def test_a_number_is_rounded_to_four_digits_or_as_a_narrow_range_or_its_quantum_needs(
    domain: Any, drawn: list[float], given: list[float]
) -> None:
    assert [complete_settings({"x": domain}, {"x": value})["x"] for value in drawn] == given


@pytest.mark.parametrize("name", ["random", "optuna", "bayesopt", "hyperopt"])
def test_the_values_of_a_narrow_range_are_spread_over_it(name: SearchName) -> None:
    space = {"algorithm.gamma": tune.uniform(0.99991, 0.99999)}
    given = {complete_settings(space, each)["algorithm.gamma"] for each in suggestions(searcher(name, space, 20, 0), 9)}
    assert len(given) == 9


@pytest.mark.parametrize(
    ("domain", "drawn", "given"),
    [(tune.qrandint(1, 7, 3), [0, 1, 4, 7], [3, 3, 3, 6]), (tune.qlograndint(1, 9, 4), [0], [4])],
)
def test_a_number_that_a_search_draws_outside_its_range_is_put_back(
    domain: Any, drawn: list[int], given: list[int]
) -> None:
    assert [complete_settings({"seed": domain}, {"seed": value})["seed"] for value in drawn] == given


@pytest.mark.parametrize("name", ["random", "optuna", "hyperopt"])
def test_every_search_gives_multiples_within_a_quantized_range(name: SearchName) -> None:
    space = {"seed": tune.qrandint(1, 7, 3)}
    given = [complete_settings(space, each)["seed"] for each in suggestions(searcher(name, space, 20, 0), 20)]
    assert set(given) == {3, 6}


# ---------------------------------------------------------------------------------------------------------------------
# Searches


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_draws_the_same_with_the_same_seed(name: str) -> None:
    first = suggestions(searcher(name, fitting(name), 6, 3), 6)
    assert suggestions(searcher(name, fitting(name), 6, 3), 6) == first
    assert len({json.dumps(each, sort_keys=True, default=float) for each in first}) == 6
    if name != "grid":
        assert suggestions(searcher(name, fitting(name), 6, 4), 6) != first


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_goes_on_after_what_was_tried(name: str) -> None:
    tried = suggestions(searcher(name, fitting(name), 6, 0), 3)
    written = json.loads(json.dumps([each | {"seed": 7} for each in tried], default=float))  # as records keep it
    resumed = suggestions(searcher(name, fitting(name), 6, 0, written), 6)
    assert resumed[:3] == tried
    assert all(each not in resumed[:i] for i, each in enumerate(resumed))


@pytest.mark.parametrize("name", ["random", "grid"])
def test_a_search_that_does_not_learn_gives_the_same_after_a_resume(name: str) -> None:
    whole = suggestions(searcher(name, fitting(name), 6, 0), 6)
    assert suggestions(searcher(name, fitting(name), 6, 0, whole[:3]), 6) == whole


def test_random_draws_as_many_as_were_asked_for_from_the_domains() -> None:
    search = searcher("random", RANGES | {"train.ppo_epochs": 2}, 5, 0)
    drawn = suggestions(search, 5)
    assert all(1e-5 <= each["train.actor_lr"] <= 1e-3 and 0 <= each["algorithm.gae_lambda"] <= 1 for each in drawn)
    assert {each["train.ppo_epochs"] for each in drawn} == {2}
    assert search.suggest("5") == Searcher.FINISHED


def test_random_is_undisturbed_by_who_else_draws() -> None:
    before = suggestions(searcher("random", RANGES, 3, 0), 3)
    np.random.seed(99)
    assert suggestions(searcher("random", RANGES, 3, 0), 3) == before


def test_a_grid_has_every_combination_once() -> None:
    search = searcher("grid", CHOICES | {"seed": 5, "rollout.max_tokens": tune.grid_search([8, 16])}, 4, 0)
    assert isinstance(search, ListSearch)
    drawn = [
        tuple(each[key] for key in ("train.ppo_epochs", "algorithm.gae_lambda", "rollout.max_tokens"))
        for each in search.candidates
    ]
    assert sorted(drawn) == [(e, lam, t) for e in (1, 2, 4) for lam in (0.9, 1.0) for t in (8, 16)]
    assert {each["seed"] for each in search.candidates} == {5}


def tell(search: Searcher, objective: Callable[[dict[str, Any]], float], count: int) -> list[float]:
    """What so many suggestions come to, each told before the next."""
    values = []
    for i in range(count):
        values.append(objective(search.suggest(str(i))))
        search.on_trial_complete(str(i), {DEFAULT_METRIC: values[-1]})
    return values


def near_a_third(settings: dict[str, Any]) -> float:
    """At most 0, where lam is 1/3 and the learning rate is a hundredth of the largest."""
    return -abs(settings["algorithm.gae_lambda"] - 1 / 3) - abs(np.log10(settings["train.actor_lr"]) + 5) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("optuna", 40), ("bayesopt", 24), ("hyperopt", 40)])
def test_an_adaptive_search_learns(name: str, count: int) -> None:
    """Its last 8 trials are better by far than the -0.75 of a thousand at random."""
    at_random = [near_a_third(each) for each in suggestions(searcher("random", RANGES, 1000, 0), 1000)]
    assert np.mean(at_random) == pytest.approx(-0.75, abs=0.05)
    assert np.mean(tell(searcher(name, RANGES, count, 0), near_a_third, count)[-8:]) > -0.55


@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_adaptive_search_is_not_held_up_by_failures(name: str) -> None:
    search = searcher(name, RANGES, 30, 0)
    for i in range(12):
        assert isinstance(search.suggest(str(i)), dict)
        search.on_trial_complete(str(i), None, error=True)
    assert isinstance(search.suggest("12"), dict)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_adaptive_search_gives_as_many_as_are_asked_for_when_the_best_lies_on_a_bound(name: str) -> None:
    search = searcher(name, {"algorithm.gae_lambda": tune.uniform(0.0, 1.0)}, 30, 0)
    assert max(tell(search, lambda settings: settings["algorithm.gae_lambda"], 30)) > 0.95


@pytest.mark.slow
def test_bayesopt_goes_to_the_best_and_then_elsewhere() -> None:
    search = searcher("bayesopt", {"algorithm.gae_lambda": tune.uniform(0.0, 1.0)}, 30, 0)
    values = tell(search, lambda settings: settings["algorithm.gae_lambda"], 30)
    assert values[10] == 1.0 and values.count(1.0) == 1  # the first after those at random


def test_bayesopt_looks_at_a_logarithmic_range_by_its_logarithm() -> None:
    first = searcher("bayesopt", RANGES, 1, 0).suggest("0")
    lr, lam = np.random.RandomState(0).uniform(size=2)
    assert first == {"train.actor_lr": pytest.approx(10 ** (-5 + 2 * lr)), "algorithm.gae_lambda": pytest.approx(lam)}


@pytest.mark.parametrize(
    ("name", "space", "line"),
    [
        ("grid", RANGES, "--search grid needs a list of values for train.actor_lr: use tune.choice"),
        ("optuna", {"seed": tune.grid_search([1])}, "--search optuna does not try all values: seed needs tune.choice"),
        ("hyperopt", {"seed": tune.grid_search([1])}, "--search hyperopt does not try all values: seed needs"),
        ("bayesopt", {"seed": tune.grid_search([1])}, "--search bayesopt does not try all values: seed needs"),
        (
            "optuna",
            RANGES | {"train.clip_range": {"from": 0.3, "to": 0.1}},
            "--search optuna takes no dict that does not vary: give train.clip_range as a setting of the sweep",
        ),
        ("bayesopt", CHOICES, "--search bayesopt needs an unbroken range for train.ppo_epochs: use tune.uniform"),
        ("bayesopt", {"seed": tune.randint(0, 9)}, "--search bayesopt needs an unbroken range for seed"),
        ("optuna", {"seed": tune.qlograndint(4, 64, 4)}, "--search optuna takes no multiples on a log scale for seed"),
        ("bayesopt", {"seed": 3}, "--search bayesopt has nothing to vary"),
        ("optuna", {"seed": 3}, "--search optuna has nothing to vary"),
        (
            "hyperopt",
            {"train.adam_betas": tune.choice([(0.8, 0.9)])},
            "--search hyperopt: the choices of train.adam_betas",
        ),
    ],
)
def test_a_space_that_is_not_for_the_search_is_refused(name: str, space: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        searcher(name, space, 4, 0)
    assert str(error.value).startswith(line)


@pytest.mark.slow
def test_without_its_library_a_search_says_what_to_install() -> None:
    """In a Python that finds neither library."""
    code = """
import sys
from importlib.machinery import PathFinder

class Hides(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("bayes_opt", "hyperopt") else super().find_spec(name, path, target)

sys.meta_path = [Hides if finder is PathFinder else finder for finder in sys.meta_path]
from rlx.config.errors import ConfigError
from rlx.sweeps.choices import check_choices
from rlx.sweeps.records import SweepPlan

for name in ("bayesopt", "hyperopt"):
    try:
        check_choices(SweepPlan("s", {}, "space.py", search=name))
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.stdout.splitlines() == [
        "--search bayesopt needs the package bayes_opt: pip install 'rlx[search]'",
        "--search hyperopt needs the package hyperopt: pip install 'rlx[search]'",
    ], done.stderr


def test_the_names_in_the_config_are_those_of_the_searches_and_schedulers() -> None:
    assert tuple(SEARCHES) == get_args(SearchName) and tuple(SCHEDULERS) == get_args(SchedulerName)


def test_the_command_offers_every_search_and_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    shown = capsys.readouterr().out
    assert f"--search {{{','.join(SEARCHES)}}}" in shown and f"--scheduler {{{','.join(SCHEDULERS)}}}" in shown
