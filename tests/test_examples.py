"""The examples in docstrings of rlx and its packages, and on pages: they run, or at least every name in them exists."""

import ast
import builtins
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import rlx

ROOT = Path(__file__).resolve().parent.parent
FACES = sorted(ROOT.glob("rlx/**/__init__.py"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
# The others need a cluster, the hub or other ranks.
RUNNABLE = ("algorithms", "cli", "config", "models", "rewards", "rollout", "storage", "tracking")


def example(face: Path) -> str:
    """The code below `Example:` in the docstring of a package, or in the Python blocks of a page."""
    if face.suffix == ".md":
        return "\n".join(re.findall(r"^```python\n(.*?)^```", face.read_text(), re.DOTALL | re.MULTILINE))
    docstring = ast.get_docstring(ast.parse(face.read_text()))
    assert docstring and "\nExample:\n" in docstring, f"{face} has no example"
    return textwrap.dedent(docstring.partition("\nExample:\n")[2])


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a dotted name means, with the imports of the example; None if it is not an imported one.

    Raises:
        AttributeError: an imported module or class has no such attribute.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, names)
        return None if owner is None else getattr(owner, node.attr)
    return None


def check_call(call: ast.Call, function: Any) -> None:
    """Raises TypeError if a function or class of rlx does not take these arguments."""
    if not getattr(function, "__module__", "").startswith("rlx."):
        return
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    inspect.signature(function).bind(*call.args, **keywords)


def test_the_docstring_of_rlx_lists_the_public_names() -> None:
    assert rlx.__doc__
    assert sorted(re.findall(r"^    (\w+)  +\S", rlx.__doc__, re.MULTILINE)) == sorted(rlx.__all__)


@pytest.mark.parametrize("face", FACES + PAGES, ids=lambda face: f"{face.parent.name}-{face.stem}")
def test_the_names_in_an_example_exist(face: Path) -> None:
    tree = ast.parse(example(face))
    assert tree.body
    names: dict[str, Any] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([statement], []), str(face), "exec"), names)
    loaded, defined = set[str](), {*names, *vars(builtins)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Attribute):
            resolved(node, names)
        elif isinstance(node, ast.Call):
            check_call(node, resolved(node.func, names))
    assert loaded <= defined


@pytest.mark.parametrize("package", RUNNABLE)
def test_an_example_runs(package: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a folder with a storage and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "storage" / "models").mkdir(parents=True)
    (tmp_path / "storage" / "models" / "mine").symlink_to(tiny_model)
    exec(compile(example(ROOT / "rlx" / package / "__init__.py"), package, "exec"), {})
