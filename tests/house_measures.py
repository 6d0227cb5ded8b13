"""Prints how rlx's source measures up: python tests/house_measures.py [--list] (`make measure`).

A row per measure: its value, its limit, and whether it holds. `--list` also names the places that count against it.
The floors and doors themselves are in test_layering.py, which also asserts these measures.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from source_code import (
    ROOT,
    Function,
    Module,
    annotation_names,
    circles,
    classes,
    defined_names,
    functions,
    import_graph,
    line_count,
    methods,
    package_graph,
    package_of,
    parameters,
    percentile,
    private_uses,
    public_functions,
    raised_errors,
    read_modules,
)

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"config", "algorithms", "types", "actors", "mesh"}),
    frozenset({"cluster", "storage", "data", "rewards", "models", "rollout", "samples", "environments"}),
    frozenset({"training", "tracking"}),
    frozenset({"runs", "analysis"}),
    frozenset({"sweeps", "replay"}),
    frozenset({"cli", "api", "__main__"}),
)
"""packages and top modules of rlx, the lowest floor first: each imports from lower floors"""

SAME_FLOOR: Mapping[tuple[str, str], str] = {
    ("data", "rewards"): "a generator's own scorer runs in the child processes in which users' reward functions do; "
    "expected answers are found in cells as answers are in completions",
    ("samples", "storage"): "completions lie where the run does, and a thread writes them as checkpoints are written",
    ("actors", "config"): "what an error says is made text in one way, also where that raises",
    ("environments", "rewards"): "programs of the policy run in the sandbox in which rewards run them",
    ("data", "storage"): "prompt files lie where runs do, and there is one way to open S3 with its keys and timeouts",
    ("__main__", "cli"): "`python -m rlx` is the command",
}
"""(package, package of the same floor that it imports): the reason"""

SHAPE = re.compile(r"\[[A-Za-z0-9_+*/ .-]+(, ?[A-Za-z0-9_+*/ .-]+)*,?\]|\bscalar|0-dim|of any shape|\bshape")
CONVENTION = re.compile(r"\[[A-Z], [A-Z]\].*unless|unless.*\[[A-Z], [A-Z]\]", re.DOTALL)
"""the shapes of all functions of a module or package, as its docstring states them: `[B, T]` unless ..."""
MAX_LINES, MAX_FILE, MAX_METHODS, MAX_PARAMETERS = 50, 400, 12, 8


@dataclass(frozen=True)
class Measure:
    """One row of the table."""

    name: str
    value: str
    limit: str
    holds: bool
    offenders: Sequence[str] = ()


def against_floors(graph: Mapping[str, set[str]]) -> list[str]:
    """The imports between packages that do not go to a lower floor and are not in the table of exceptions."""
    level = {package: number for number, floor in enumerate(FLOORS) for package in floor}
    pairs = [(name, target) for name, targets in graph.items() for target in sorted(targets)]
    return [
        f"{name} -> {target}"
        for name, target in pairs
        if (edge := (package_of(name), package_of(target))) not in SAME_FLOOR
        and edge[0] != edge[1]
        and level[edge[1]] >= level[edge[0]]
    ]


def measure(package: Path = ROOT / "rlx", tests: Path = ROOT / "tests") -> list[Measure]:
    """All measures of the source, in the order in which they are printed."""
    modules = read_modules(package)
    return [*structure(modules, package), *sizes(modules), *meanings(modules), *texts(modules, package, tests)]


def structure(modules: Mapping[str, Module], package: Path) -> Iterator[Measure]:
    graph = import_graph(modules)
    yield at_most("floors", len(FLOORS), 6)
    yield none("imports against the floors", against_floors(graph))
    groups = [*circles(graph), *circles(package_graph(graph))]
    yield none("circles of modules or packages", [" <-> ".join(group) for group in groups])
    uses = [(module, *use) for module in modules.values() for use in private_uses(module, modules)]
    yield none("private names of other modules", [f"{module.at(node)} {name}" for module, node, name in uses])
    top = sorted(path.name for path in package.glob("*.py") if path.name != "__main__.py")  # which nothing imports
    yield at_most("modules at the top of rlx/", len(top), 5, top)
    counts = package_sizes(modules)
    yield Measure(
        "modules of a package",
        f"{min(counts.values())} to {max(counts.values())}",
        "3 to 11",
        all(3 <= size <= 11 for size in counts.values()),
        [f"{name}: {size}" for name, size in counts.items() if not 3 <= size <= 11],
    )


def package_sizes(modules: Mapping[str, Module]) -> dict[str, int]:
    """How many modules each package below rlx has; its `__init__` is not counted."""
    packages = [name for name, module in modules.items() if module.is_face and "." in name]
    parents = [name.rpartition(".")[0] for name, module in modules.items() if not module.is_face]
    return {name: parents.count(name) for name in packages}


def sizes(modules: Mapping[str, Module]) -> Iterator[Measure]:
    every = [(module, function) for module in modules.values() for function in functions(module.tree)]
    lengths = [line_count(function) for _, function in every]
    yield at_most("function lines, median", round(median(lengths)), 8)
    yield at_most("function lines, 90 % at most", percentile(lengths, 0.9), 20)
    yield largest("function lines, largest", _sized(every, line_count), MAX_LINES)
    files = {f"{module.path.relative_to(module.root)}": len(module.text.splitlines()) for module in modules.values()}
    yield largest("file lines, largest", files, MAX_FILE)
    owners = [(module, each) for module in modules.values() for each in classes(module.tree)]
    yield largest("methods of a class, most", _sized(owners, lambda each: len(methods(each))), MAX_METHODS)
    counts = _sized(every, lambda function: len(parameters(function)))
    yield largest("parameters of a function, most", counts, MAX_PARAMETERS)
    whole = [f"{module.at(function)} {function.name}" for module, function in every if takes_whole_config(function)]
    yield at_most("functions that take the whole RunConfig", len(whole), 20, whole)


def takes_whole_config(function: Function) -> bool:
    return any("RunConfig" in annotation_names(each.annotation) for each in parameters(function))


def meanings(modules: Mapping[str, Module]) -> Iterator[Measure]:
    places = defaultdict[str, list[str]](list)
    for module in modules.values():
        for node in module.tree.body:
            for name in defined_names(node):
                if name[0] != "_" and name != "main":
                    places[name].append(module.at(node))
    twice = [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]
    yield at_most("public names that mean two things", len(twice), 10, twice)


def texts(modules: Mapping[str, Module], package: Path, tests: Path) -> Iterator[Measure]:
    public = [(module, function) for module in modules.values() for function in public_functions(module.tree)]
    tensors = [(module, function) for module, function in public if handles_tensors(function)]
    faces = {name: ast.get_docstring(module.tree) or "" for name, module in modules.items() if module.is_face}

    def stated(module: Module, function: Function) -> bool:
        return states_shapes(module, function, faces.get(module.name.rpartition(".")[0], ""))

    yield share("functions with tensors that state shapes", tensors, stated, 0.9)
    raising = [(module, function) for module, function in public if raised_errors(function)]
    yield share("functions that raise and say so", raising, lambda _, function: states_errors(function), 0.9)
    code, test = lines_below(package), lines_below(tests)
    yield Measure("test lines : code lines", f"{test / code:.2f}", ">= 0.90", test / code >= 0.9)


def handles_tensors(function: Function) -> bool:
    annotations = [function.returns, *(each.annotation for each in parameters(function))]
    return any("Tensor" in annotation_names(annotation) for annotation in annotations)


def states_shapes(module: Module, function: Function, face: str = "") -> bool:
    """Whether shapes are in the docstring, in a comment beside a parameter, or in a convention for the whole module.

    face: the docstring of the module's package.
    """
    signature = "\n".join(module.text.splitlines()[function.lineno - 1 : function.body[0].lineno - 1])
    comments = " ".join(re.findall(r"#(.*)", signature))
    convention = CONVENTION.search(f"{ast.get_docstring(module.tree)} {face}")
    return bool(convention or SHAPE.search(f"{ast.get_docstring(function)} {comments}"))


def states_errors(function: Function) -> bool:
    """Whether the docstring has a section of errors or names one of them."""
    text = ast.get_docstring(function) or ""
    return "Raises:" in text or any(name in text for name in raised_errors(function))


def lines_below(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def at_most(name: str, value: int, limit: int, offenders: Sequence[str] = ()) -> Measure:
    """A number with an upper limit, and the places that it counts."""
    return Measure(name, str(value), f"<= {limit}", value <= limit, offenders)


def none(name: str, offenders: Sequence[str]) -> Measure:
    """The number of places, which should be none."""
    return Measure(name, str(len(offenders)), "0", not offenders, offenders)


def largest(name: str, sizes: Mapping[str, int], limit: int) -> Measure:
    """The largest of many sizes, each of which should be within the limit."""
    over = sorted((place for place, size in sizes.items() if size > limit), key=lambda place: -sizes[place])
    offenders = [f"{place}: {sizes[place]}" for place in over]
    return Measure(name, str(max(sizes.values(), default=0)), f"<= {limit}", not over, offenders)


def share(
    name: str, every: Sequence[tuple[Module, Function]], does: Callable[[Module, Function], bool], limit: float
) -> Measure:
    """How many of the functions do what they should."""
    lacking = [f"{module.at(function)} {function.name}" for module, function in every if not does(module, function)]
    part = 1 - len(lacking) / len(every)
    return Measure(name, f"{part:.2f} of {len(every)}", f">= {limit:.2f}", part >= limit, lacking)


def _sized(every: Iterable[tuple[Module, Function | ast.ClassDef]], size: Callable[..., int]) -> dict[str, int]:
    return {f"{module.at(node)} {node.name}": size(node) for module, node in every}


def as_table(rows: Sequence[Measure]) -> str:
    cells = [
        ("measure", "value", "limit", "ok"),
        *((r.name, r.value, r.limit, "yes" if r.holds else "NO") for r in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(" | ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)) for row in cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures of rlx's source, each with its limit.", allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="also name the places that count against each measure")
    args = parser.parse_args(argv)
    rows = measure()
    print(as_table(rows))
    for row in rows if args.list else ():
        if row.offenders:
            print("\n".join(["", f"{row.name} ({row.limit}):", *(f"  {place}" for place in row.offenders)]))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
