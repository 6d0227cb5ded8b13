"""Errors of rlx travel between processes: what is unpickled is what was raised."""

import ast
import pickle

import pytest
from source_code import ROOT, read_modules

from rlx.actors import CallFailedError, EngineTimeoutError
from rlx.cluster.resources import NoRoomError
from rlx.config.errors import ConfigError, one_line
from rlx.environments.agents.wire import RefusedRequest
from rlx.rewards.child import ChildError
from rlx.rewards.custom import RewardError
from rlx.storage.filesystem import StorageError
from rlx.types import EnvironmentFailed

MADE = [
    CallFailedError("engine 1", ValueError("no")),
    ChildError("raised ValueError", "its trace"),
    ConfigError("a\nb"),
    EnvironmentFailed("took longer than 1 s", "hung", "file.py:3"),
    NoRoomError("scaling", []),
    RefusedRequest("no", status=404),
    RewardError("reward f", "details"),
    StorageError("a\nb"),
]
"""one of each class that is made of other arguments than its text"""


@pytest.mark.parametrize("error", [*MADE, EngineTimeoutError.of(1)], ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), repr(vars(found))) == (str(error), repr(vars(error)))


def test_the_errors_above_are_all_that_have_arguments_of_their_own() -> None:
    classes = [
        node
        for module in read_modules(ROOT / "rlx").values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any(is_error(ast.unparse(base)) for base in node.bases)
    ]
    own = [
        each.name for each in classes if any(getattr(node, "name", "") in ("__init__", "__new__") for node in each.body)
    ]
    assert len(classes) > 20 and sorted(own) == [type(error).__name__ for error in MADE]


def is_error(name: str) -> bool:
    return name.endswith(("Error", "Exception", "Failed", "Lost", "Timeout"))


def test_a_failure_of_an_environment_can_be_written_as_utf8() -> None:
    failed = EnvironmentFailed("raised ValueError: \udcff", raised_at="\ud83d.py:3")
    assert (failed.failure, failed.raised_at, str(failed)) == (
        "raised ValueError: ?",
        "?.py:3",
        "raised ValueError: ? at ?.py:3",
    )


def test_the_text_of_an_error_that_has_none_is_the_name_of_its_type() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert one_line(Silent()) == "Silent" and str(CallFailedError("a", Silent())) == "a failed: Silent"
