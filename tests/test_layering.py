"""The floors of the house, its doors and its measures, read from the source with ast.

The floors and the limits are in house_measures.py, the readers of source in source_code.py. The last tests here show
that the readers and the measures can fail.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import house_measures as measure
import pytest
from house_measures import FLOORS, MAX_FILE, MAX_LINES, SAME_FLOOR, Measure
from source_code import (
    ROOT,
    Module,
    at_load,
    circles,
    defined_names,
    depth,
    functions,
    import_graph,
    imported_names,
    line_count,
    methods,
    package_graph,
    package_of,
    parameters,
    percentile,
    private_attributes,
    private_of,
    private_uses,
    raised_errors,
    reachable,
    read_modules,
)

MODULES = read_modules(ROOT / "rlx")
GRAPH = import_graph(MODULES)
SCRIPTS = [Module.read(path) for path in sorted((ROOT / "experiments").glob("*.py"))]
RAY = {"actors", "api", "cluster", "data", "environments", "rewards", "rollout", "runs", "sweeps"}
"""packages that may import ray; api does it for its annotations alone"""
LOOP_LINES, LOOP_DEPTH = 100, 3


def importers(library: str) -> set[str]:
    """The modules of rlx that import an outside library anywhere in them."""
    return {name for name, each in MODULES.items() if library in roots(each.imports)}


def roots(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# ---------------------------------------------------------------------------------------------------------------------
# Floors and doors


def test_every_package_is_on_one_floor() -> None:
    packages = [package for floor in FLOORS for package in floor]
    assert sorted(packages) == sorted({package_of(name) for name in GRAPH})


def test_a_package_names_the_packages_that_it_imports() -> None:
    for package, targets in package_graph(GRAPH).items():
        if (ROOT / "rlx" / package).is_dir():
            text = ast.get_docstring(MODULES[f"rlx.{package}"].tree) or ""
            named = re.search(r"^Imports of rlx: ([\w, \n]+)\.$", text, re.MULTILINE)
            assert named, package
            assert named[1].replace("\n", " ").split(", ") == (sorted(targets) or ["none"]), package


def test_packages_import_those_above_them_in_the_table_of_the_guide() -> None:
    table = re.findall(r"^\| `rlx/(\w+)/` \|", (ROOT / "docs/extending.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(name for name in package_graph(GRAPH) if (ROOT / "rlx" / name).is_dir())
    for place, package in enumerate(table):
        below = package_graph(GRAPH)[package] & set(table[place:])
        assert not below, f"{package} imports {below}"


def test_exceptions_on_a_floor_are_used_and_have_a_reason() -> None:
    floor_of = {package: floor for floor in FLOORS for package in floor}
    for (package, target), reason in SAME_FLOOR.items():
        assert floor_of[package] is floor_of[target] and reason
        assert target in package_graph(GRAPH)[package], f"{package} no longer imports {target}"


def test_modules_of_rlx_do_not_use_its_public_face() -> None:
    """`import rlx` leads back to every package: inside rlx it may give the version alone."""
    used = {target for module in MODULES.values() for target in module.imports if is_face_name(target)}
    assert used - {"rlx.__version__"} == set()


def is_face_name(name: str) -> bool:
    return name == "rlx" or (name.startswith("rlx.") and name.count(".") == 1 and name not in MODULES)


def test_nothing_outside_rlx_is_imported_by_it() -> None:
    for folder in ("experiments", "bench", "search_spaces", "tests"):
        assert importers(folder) == set()


def test_vllm_and_mlflow_have_two_doors_and_other_trackers_one() -> None:
    assert importers("vllm") == {"rlx.rollout.vllm_engine", "rlx.rollout.vllm_scheduler"}
    assert importers("mlflow") == {"rlx.tracking.services.mlflow", "rlx.tracking.services.mlflow_page"}
    assert importers("wandb") == {"rlx.tracking.services.wandb"}
    assert importers("tensorboardX") == {"rlx.tracking.services.tensorboard"}


def test_ray_is_imported_where_it_is_used_alone() -> None:
    assert {package_of(name) for name in importers("ray")} <= RAY


def test_ray_is_used_by_public_names_alone() -> None:
    """Private parts of Ray change with every minor version. One file name is known too, see launch._TRAIN_RECORD.

    `ray.experimental` has the one function that says where an object lies, for data/blocks.py, which tests call.
    """
    names = {name for module in MODULES.values() for name in module.imports if name.startswith("ray.")}
    private = {name for name in names for part in name.split(".") if part.startswith("_") or part == "experimental"}
    assert names and private == {"ray.experimental"}


def test_no_private_part_of_ray_is_reached_by_dots() -> None:
    """Neither `ray._private`, nor a private attribute of an object that Ray may have made; one function apart."""
    users = {name: MODULES[name] for name in importers("ray")}
    found = {name: {*private_of("ray", module), *private_attributes(module)} for name, module in users.items()}
    found = {name: uses - {"os._exit"} for name, uses in found.items()}
    assert {name: uses for name, uses in found.items() if uses} == {"rlx.data.blocks": {"ray.experimental"}}


@pytest.mark.parametrize("library", ["ray", "torch"])
def test_settings_need_neither_torch_nor_ray(library: str) -> None:
    """Whatever a module of rlx.config imports, directly or not."""
    start = {name for name in GRAPH if package_of(name) == "config"}
    assert (start | {target for name in start for target in reachable(GRAPH, name)}) & importers(library) == set()


@pytest.mark.parametrize(
    "module", ["types", "algorithms", "rewards.functions", "rewards.scoring", "training.experience"]
)
def test_what_runs_without_ray_does_not_import_it(module: str) -> None:
    assert {name for name in importers("ray") if name.startswith(f"rlx.{module}")} == set()


@pytest.mark.slow
def test_loading_training_loads_neither_ray_nor_mlflow_nor_vllm() -> None:
    """Whatever a module of rlx.training imports, directly or not, when it is loaded."""
    loaded = {name: at_load(module) for name, module in MODULES.items()}
    graph = import_graph(loaded)
    start = {name for name in graph if package_of(name) == "training"}
    names = start | {target for name in start for target in reachable(graph, name)}
    libraries = {library for name in names for library in roots(loaded[name].imports)}
    assert "torch" in libraries and libraries & {"ray", "mlflow", "vllm"} == set()


def test_tensor_functions_never_see_a_config() -> None:
    modules = [name for name in GRAPH if package_of(name) == "algorithms" or name == "rlx.training.experience"]
    assert modules
    assert not {name for name in modules for target in GRAPH[name] if package_of(target) == "config"}


# ---------------------------------------------------------------------------------------------------------------------
# Measures

ROWS = {row.name: row for row in measure.measure()}


@pytest.mark.parametrize("name", ROWS)
def test_measures_hold(name: str) -> None:
    row = ROWS[name]
    assert row.holds, "\n".join([f"{row.name}: {row.value}, limit {row.limit}", *row.offenders])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.path.name)
def test_scripts_are_short(script: Module) -> None:
    assert len(script.text.splitlines()) <= MAX_FILE
    assert {f.name: line_count(f) for f in functions(script.tree) if line_count(f) > MAX_LINES} == {}


def test_the_loop_is_one_screen() -> None:
    (loop,) = (f for f in functions(MODULES["rlx.training.loop"].tree) if f.name == "train")
    assert line_count(loop) <= LOOP_LINES
    assert depth(loop) <= LOOP_DEPTH


# ---------------------------------------------------------------------------------------------------------------------
# The readers can fail


def package(folder: Path, **files: str) -> dict[str, Module]:
    """The modules of a package `rlx` in a folder; a__b names a/b.py."""
    for name, text in {"__init__": "", **files}.items():
        path = folder / "rlx" / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return read_modules(folder / "rlx")


def test_imports_in_functions_and_for_types_are_seen(tmp_path: Path) -> None:
    in_function = "def f():\n    from rlx.config.b import x\n"
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlx.types\n"
    modules = package(tmp_path, config__a=in_function, config__b=for_types, types="from rlx.config import a\n")
    graph = import_graph(modules)
    assert graph["rlx.config.a"] == {"rlx.config.b"}
    assert graph["rlx.config.b"] == {"rlx.types"}
    assert circles(graph) == [["rlx.config.a", "rlx.config.b", "rlx.types"]]
    assert circles(package_graph(graph)) == [["config", "types"]]


def test_private_parts_of_a_library_are_seen_behind_its_names(tmp_path: Path) -> None:
    text = "import ray.util as u\nfrom ray import tune\nu._x.f()\nray.experimental.g()\nhandle._actor_id\nself._own\n"
    module = package(tmp_path, config__a=text)["rlx.config.a"]
    assert {*private_of("ray", module)} == {"u._x", "ray.experimental"}
    assert {*private_attributes(module)} == {"u._x", "handle._actor_id"}


def test_a_line_of_modules_is_no_circle() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert reachable({"a": {"b"}, "b": {"c"}, "c": set()}, "a") == {"b", "c"}


def test_imports_against_the_floors_are_seen(tmp_path: Path) -> None:
    up, side = "from rlx.training.t import x\n", "from rlx.data import d\n"
    modules = package(tmp_path, config__c=up, storage__s=side, training__t="import rlx.config.c\n", data__d="")
    wrong = ["rlx.config.c -> rlx.training.t", "rlx.storage.s -> rlx.data.d"]
    assert measure.against_floors(import_graph(modules)) == wrong


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="relative"):
        list(imported_names(ast.parse("from . import x")))


def test_private_names_of_other_modules_are_seen(tmp_path: Path) -> None:
    imports = "import rlx.config.a\nfrom rlx.config import a\nfrom rlx.config.a import _x, y\n"
    uses = "a._z\nrlx.config.a._w\nself._v\n"
    modules = package(tmp_path, config__a="_x = _z = y = 1\n", config__b=imports + uses)
    names = [name for _, name in private_uses(modules["rlx.config.b"], modules)]
    assert names == ["rlx.config.a._x", "rlx.config.a._z", "rlx.config.a._w"]
    assert list(private_uses(modules["rlx.config.a"], modules)) == []


def test_what_a_module_defines_is_seen() -> None:
    text = "def f(): ...\nclass A: ...\nB, C = D = 1\nE: int = [g for g in a]\nh.i = j[0] = 2\nfrom k import l\n"
    names = [name for statement in ast.parse(text).body for name in defined_names(statement)]
    assert sorted(names) == ["A", "B", "C", "D", "E", "f"]


def test_functions_and_classes_are_measured() -> None:
    tree = ast.parse(
        "class A:\n"
        "    def f(self, a, *, b: 'RunConfig | None' = None):\n"
        "        for x in a:\n"
        "            if x:\n"
        "                raise errors.ConfigError(x)\n"
        "    @property\n"
        "    def g(self): ...\n"
    )
    (class_,) = tree.body
    assert isinstance(class_, ast.ClassDef)
    f, g = methods(class_)
    assert (line_count(f), line_count(g)) == (4, 1)
    assert [each.arg for each in parameters(f)] == ["a", "b"]
    assert depth(f) == 2
    assert raised_errors(f) == {"ConfigError"}
    assert measure.takes_whole_config(f) and not measure.takes_whole_config(g)
    assert not measure.states_errors(f)
    assert percentile([1, 2, 3, 4, 100], 0.8) == 4


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ('def f(x: Tensor):\n    """Adds [B, T] to itself."""', True),
        ("def f(\n    x: Tensor,  # [B, T]\n): ...", True),
        ('"""Shapes are [B, T] unless said."""\ndef f(x: Tensor): ...', True),
        ('def f(x: Tensor):\n    """Adds x to itself."""', False),
        ("def f(x: list[int, int]) -> Tensor: ...", False),
    ],
)
def test_shapes_are_seen(text: str, stated: bool) -> None:
    module = Module("m", ROOT / "m.py", text)
    (function,) = functions(module.tree)
    assert measure.handles_tensors(function)
    assert measure.states_shapes(module, function) is stated
    assert measure.states_shapes(module, function, "Tensors are [B, T] unless another shape is stated.")


def test_a_broken_limit_is_shown_with_its_places(tmp_path: Path) -> None:
    long = "def long():\n" + "    pass\n" * 60
    modules = package(tmp_path, config__a=f"{long}_A = B = 1\n", config__b="def long(): ...\n_A = 2\n", types="B = 3\n")
    rows = {row.name: row for row in [*measure.sizes(modules), *measure.meanings(modules)]}
    assert rows["function lines, largest"] == Measure(
        "function lines, largest", "61", "<= 50", False, ["rlx/config/a.py:1 long: 61"]
    )
    assert rows["public names that mean two things"].offenders == [
        "B: rlx/config/a.py:62, rlx/types.py:1",
        "long: rlx/config/a.py:1, rlx/config/b.py:1",
    ]
    assert "NO" in measure.as_table([rows["function lines, largest"]])
