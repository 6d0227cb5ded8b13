"""Unit tests that need an installed package, which the sandbox lacks. Left out: whether other tests can be passed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from rlx.rewards.sandbox.inside.unit_tests import find_tests

_PACKAGES = {
    *("bs4", "cv2", "django", "flask", "hypothesis", "matplotlib", "networkx", "nltk", "numpy", "pandas"),
    *("parameterized", "pytest", "requests", "scipy", "seaborn", "sklearn", "statsmodels", "sympy", "tensorflow"),
    "torch",
}
"""what unit tests commonly import that is not Python's own, and that no program defines"""
_WHOLE = (
    *(ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise),
    *(ast.Call, ast.keyword, ast.Starred, ast.Attribute, ast.Subscript, ast.Slice, ast.BinOp, ast.UnaryOp),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue),
)
"""what is evaluated with all of its parts"""


def imported_packages(tree: ast.Module) -> set[str]:
    """The packages that a module of unit tests imports somewhere. A test may pass without them."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {package for each in imports for _, package in _bound(each)} & _PACKAGES


def missing_packages(tree: ast.Module) -> list[str | None]:
    """For each test, a package without which it fails whatever the program is; None if it may pass.

    Only what a test evaluates in any case counts. What is imported at the top by `from`, and any other module, may be
    the program's.
    """
    tests, missing = find_tests(tree), _missing_names(tree)
    times = Counter(test.name for test in tests if isinstance(test, ast.FunctionDef))

    def needed(test: ast.stmt) -> str | None:
        if isinstance(test, ast.FunctionDef) and times[test.name] > 1:
            return None  # only one of them is called
        return next((package for start in _starts(test) for package in _needed(start, missing)), None)

    return [needed(test) for test in tests]


def _missing_names(tree: ast.Module) -> dict[str, str]:
    """The names that nothing but an `import` of such a package at the top binds, and the package of each."""
    top = [each for each in tree.body if isinstance(each, ast.Import)]
    missing = {name: package for each in top for name, package in _bound(each) if package in _PACKAGES}
    own = set[str]()
    for node in ast.walk(tree) if missing else ():
        match node:
            case ast.Import() | ast.ImportFrom():
                own |= {name for name, package in _bound(node) if node not in top or package not in _PACKAGES}
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                own.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
    return {name: package for name, package in missing.items() if name not in own}


def _bound(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that an import binds, and the package that each is of."""
    for each in node.names:
        module = each.name if isinstance(node, ast.Import) else node.module or ""
        yield each.asname or each.name.partition(".")[0], module.partition(".")[0]


def _starts(test: ast.stmt) -> Iterator[ast.AST]:
    """The statements of a test that are executed in any case, one after the other, at least in part."""
    if not isinstance(test, ast.FunctionDef):
        yield test
    elif test.decorator_list:
        yield from test.decorator_list  # they decide what becomes of the rest
    elif not _has(test, ast.Yield, ast.YieldFrom):
        for statement in test.body:
            yield statement
            if _has(statement, ast.Return):
                return


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(each, kinds) for each in ast.walk(node))


def _needed(start: ast.AST, missing: dict[str, str]) -> Iterator[str]:
    """The packages that are needed for what a statement or decorator evaluates in any case."""
    nodes = [start]
    while nodes:
        match node := nodes.pop():
            case ast.Name(id=name) if name in missing:
                yield missing[name]
            case ast.Import() | ast.ImportFrom():
                yield from (package for _, package in _bound(node) if package in _PACKAGES)
            case ast.Assert(test=first) | ast.If(test=first) | ast.IfExp(test=first) | ast.While(test=first):
                nodes.append(first)
            case ast.For(iter=first) | ast.BoolOp(values=[first, *_]) | ast.With(items=[ast.withitem(first), *_]):
                nodes.append(first)
            case ast.Compare(left=left, comparators=[right, *_]):
                nodes += [left, right]
            case _ if isinstance(node, _WHOLE):
                nodes += ast.iter_child_nodes(node)
