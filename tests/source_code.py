"""Readers of rlx's source: modules, imports, functions, classes and the circles of a graph.

All of it is read with `ast`; nothing of rlx is imported. What the numbers should be is in house_measures.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Module:
    """One Python file: its dotted name, its path and its text."""

    name: str  # rlx.storage for rlx/storage/__init__.py
    path: Path
    text: str
    root: Path = ROOT  # the folder that the package is in

    @classmethod
    def read(cls, path: Path, root: Path = ROOT) -> Module:
        parts = path.relative_to(root).with_suffix("").parts
        return cls(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, path.read_text(), root)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> frozenset[str]:
        return frozenset(imported_names(self.tree))

    @property
    def is_face(self) -> bool:
        """Whether it is a package's `__init__.py`."""
        return self.path.name == "__init__.py"

    def at(self, node: ast.AST) -> str:
        """The address of a node for a person: rlx/mesh.py:24."""
        return f"{self.path.relative_to(self.root)}:{getattr(node, 'lineno', 1)}"


def read_modules(package: Path) -> dict[str, Module]:
    """Every module of a package by its dotted name; folders without an `__init__.py` hold data and are left out."""
    files = sorted(path for path in package.rglob("*.py") if (path.parent / "__init__.py").is_file())
    modules = [Module.read(path, package.parent) for path in files]
    return {module.name: module for module in modules}


def imported_names(node: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports anywhere in it, in functions and under TYPE_CHECKING as well.

    `from package import name` gives package.name.
    """
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"line {statement.lineno}: relative import"
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


class _AtLoad(ast.NodeTransformer):
    """Removes what does not run when a module is loaded: functions, and what is for type checkers alone."""

    def visit_FunctionDef(self, node: ast.AST) -> ast.Pass:
        return ast.Pass()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def at_load(module: Module) -> Module:
    """The part of a module that runs when it is loaded."""
    tree = ast.fix_missing_locations(_AtLoad().visit(ast.parse(module.text)))
    return replace(module, text=ast.unparse(tree))


def imported_modules(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Which of `modules` a module imports. The root package is left out: Python runs it before any module of it."""
    targets = {name if name in modules else name.rpartition(".")[0] for name in module.imports}
    return {name for name in targets if name in modules and "." in name} - {module.name}


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """For each module but the root package, the modules that it imports."""
    return {name: imported_modules(module, modules) for name, module in modules.items() if "." in name}


def package_of(name: str) -> str:
    """The package of rlx that a module is in, or its own name at the top: rlx.rollout.weight_sync.push -> rollout."""
    return name.split(".")[1]


def package_graph(graph: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """For each package, the other packages that its modules import."""
    packages: dict[str, set[str]] = {package_of(name): set() for name in graph}
    for name, targets in graph.items():
        packages[package_of(name)] |= {package_of(target) for target in targets} - {package_of(name)}
    return packages


def reachable(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    """Every node that a path from `start` leads to."""
    seen: set[str] = set()
    waiting = set(graph[start])
    while waiting:
        node = waiting.pop()
        seen.add(node)
        waiting |= graph[node] - seen
    return seen


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The groups of nodes that reach one another, each group sorted."""
    reach = {node: reachable(graph, node) for node in graph}
    groups = {tuple(sorted(n for n in reach[node] if node in reach[n])) for node in graph if node in reach[node]}
    return sorted(list(group) for group in groups)


def private_uses(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[ast.AST, str]]:
    """Where a module uses a private name of another: `from rlx.x import _y` and `x._y` after `from rlx import x`."""
    aliases = dict[str, str]()
    for statement in ast.walk(module.tree):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                full = f"{statement.module}.{alias.name}"
                if full in modules:
                    aliases[alias.asname or alias.name] = full
                elif statement.module in modules and is_private(alias.name):
                    yield statement, full
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            target = aliases.get(node.value.id) if isinstance(node.value, ast.Name) else ast.unparse(node.value)
            if target in modules and target != module.name:
                yield node, f"{target}.{node.attr}"


def private_of(library: str, module: Module) -> Iterator[str]:
    """Where a module goes through a private part of a library: `ray._private`, or `u._x` after `import ray.x as u`."""
    names = {library}
    for statement in ast.walk(module.tree):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            source = getattr(statement, "module", None) or ""
            full = [f"{source}.{alias.name}".strip(".") for alias in statement.names]
            named = zip(statement.names, full, strict=True)
            names |= {alias.asname or alias.name for alias, name in named if name.partition(".")[0] == library}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (node.attr == "experimental" or is_private(node.attr)):
            text = ast.unparse(node)
            if text.partition(".")[0] in names:
                yield text


def private_attributes(module: Module) -> Iterator[str]:
    """Where a module reads a private attribute of another object than self and cls."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls"):
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def functions(node: ast.AST) -> Iterator[Function]:
    """All functions in a file, methods and inner functions too."""
    return (child for child in ast.walk(node) if isinstance(child, Function))


def classes(node: ast.AST) -> Iterator[ast.ClassDef]:
    return (child for child in ast.walk(node) if isinstance(child, ast.ClassDef))


def methods(of: ast.ClassDef) -> list[Function]:
    """The functions that a class defines; overloads and setters of one name count once."""
    return list({child.name: child for child in of.body if isinstance(child, Function)}.values())


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Functions at the top of a module and methods of its public classes, those without an underscore in front."""
    bodies = [
        tree.body,
        *(child.body for child in tree.body if isinstance(child, ast.ClassDef) and child.name[0] != "_"),
    ]
    for body in bodies:
        yield from (child for child in body if isinstance(child, Function) and child.name[0] != "_")


def defined_names(statement: ast.stmt) -> Iterator[str]:
    """The names of a function, of a class, or of what is assigned."""
    if isinstance(statement, Function | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        yield from (name.id for name in names if isinstance(name.ctx, ast.Store))


def line_count(function: Function) -> int:
    """Lines from `def` to the end, without decorators."""
    assert function.end_lineno
    return function.end_lineno - function.lineno + 1


def depth(node: ast.AST) -> int:
    """How deep blocks are nested in a node."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith, Function)
    return max((depth(child) + isinstance(child, blocks) for child in ast.iter_child_nodes(node)), default=0)


def parameters(function: Function) -> list[ast.arg]:
    """All parameters but self and cls."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return [each for each in named if each.arg not in ("self", "cls")]


def annotation_names(annotation: ast.expr | None) -> set[str]:
    """The names in an annotation, in a quoted one too: `Sequence["Tensor"] | None` -> Sequence, Tensor."""
    if annotation is None:
        return set()
    names = set[str]()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= annotation_names(ast.parse(node.value, mode="eval").body)
    return names


def raised_errors(function: Function) -> set[str]:
    """The names of the errors that a function itself raises; inner functions and bare `raise` are left out."""
    names = set[str]()
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            names.add(ast.unparse(error).rpartition(".")[2])
        waiting += ast.iter_child_nodes(node)
    return names


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return next(value for i, value in enumerate(ordered, 1) if i >= share * len(ordered))
