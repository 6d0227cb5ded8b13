"""The layers of the design and the house measures, read from the source with ast."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "rlx").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")])
PARTS = {"storage", "data", "tasks", "rewards", "rollout", "model", "algorithms", "experience"}
LAYERS = [
    {"types", "settings"},
    {"config", "math_judge", "shards"},  # what a person writes becomes settings
    {"command_line", "logprobs"},
    PARTS | {"adaptive", "parallel", "reward_model", "clock", "controller", "plan", "report", "progress", "warm_start"},
    {"remote_reward", "preferences", "balance", "archive", "checkpoint", "tracker"},
    {"saver", "fleet"},
    {"rounds"},
    {"roles"},
    {"worker"},
    {"assembly"},
    {"update", "metrics", "inputs", "run_folder"},
    {"train_loop", "export", "listing"},
    {"doctor"},
    {"crew"},
    {"launch"},
    {"search"},
    {"schedulers", "trials"},
    {"trial"},
    {"sweep", "records"},
    {"comparison"},
    {"importance"},
    {"figures"},
    {"page"},
    {"analysis"},
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match, ast.FunctionDef)

FUNCTION_LINES, FILE_LINES = 60, 450
LOOP_LINES, LOOP_DEPTH = 100, 3


def tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text(), str(source))


def unit(source: Path) -> str:
    """What the layers call a file: the module's name, or the package's for what lies in one."""
    return source.relative_to(ROOT / "rlx").with_suffix("").parts[0]


def imports(node: ast.AST) -> Iterator[str]:
    """The modules that a file imports anywhere in it, `from package import name` as package.name."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, f"line {found.lineno}: relative import"
            yield from (f"{found.module}.{alias.name}" for alias in found.names)


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (found for found in ast.walk(node) if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno
    return function.end_lineno - function.lineno + 1


def depth(node: ast.AST) -> int:
    """How deep blocks are nested in a node."""
    return max((depth(child) + isinstance(child, NESTING) for child in ast.iter_child_nodes(node)), default=0)


def name(source: Path) -> str:
    return str(source.relative_to(ROOT))


def importers(package: str) -> set[str]:
    return {name(s) for s in SOURCES if any(found.split(".")[0] == package for found in imports(tree(s)))}


def test_the_readers_of_source_see_what_is_there() -> None:
    code = ast.parse("import a.b\ndef f():\n  for x in y:\n    if x:\n      from c.d import e, g\n  while x: pass\n")
    assert list(imports(code)) == ["a.b", "c.d.e", "c.d.g"]
    (function,) = functions(code)
    assert lines(function) == 5
    assert depth(function) == 2
    assert unit(ROOT / "rlx/rollout/pool.py") == "rollout"


def test_every_module_has_a_layer() -> None:
    assert {unit(s) for s in SOURCES if s.is_relative_to(ROOT / "rlx")} - {"__init__"} == set(LEVELS)


@pytest.mark.parametrize("source", [s for s in SOURCES if s.is_relative_to(ROOT / "rlx")], ids=name)
def test_a_module_imports_only_from_lower_layers(source: Path) -> None:
    own = unit(source)
    used = {found.split(".")[1] for found in imports(tree(source)) if found.startswith("rlx.")} - {own, "__version__"}
    assert not {other for other in used if LEVELS[other] >= LEVELS.get(own, 0)}


def test_experiments_are_imported_by_nobody_below() -> None:
    assert not {file for file in importers("experiments") if file.startswith("rlx/")}


def test_heavy_libraries_have_one_door() -> None:
    assert importers("vllm") == {"rlx/rollout/engine.py"}
    assert importers("mlflow") == {"rlx/report.py"}


@pytest.mark.parametrize("module", ["types", "settings", "config", "rewards", "algorithms", "experience"])
def test_what_runs_without_ray_does_not_import_it(module: str) -> None:
    assert f"rlx/{module}.py" not in importers("ray")


@pytest.mark.parametrize("module", ["algorithms", "experience"])
def test_tensor_functions_never_see_a_config(module: str) -> None:
    used = set(imports(tree(ROOT / f"rlx/{module}.py")))
    assert not {found for found in used if found.startswith(("rlx.config", "rlx.settings"))}


@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_functions_and_files_are_short(source: Path) -> None:
    assert len(source.read_text().splitlines()) <= FILE_LINES
    assert {f.name: lines(f) for f in functions(tree(source)) if lines(f) > FUNCTION_LINES} == {}


def test_the_loop_is_one_screen() -> None:
    (loop,) = (f for f in functions(tree(ROOT / "rlx/train_loop.py")) if f.name == "train_loop")
    assert lines(loop) <= LOOP_LINES
    assert depth(loop) <= LOOP_DEPTH
