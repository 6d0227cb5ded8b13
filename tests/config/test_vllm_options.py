"""Which names of options vLLM knows, read from its sources, and when they are asked for."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.rollout import RolloutConfig
from rlx.config.vllm_options import check_option_names


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources of a vLLM with a few options."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(
        "class Other:\n    other: int\nclass EngineArgs:\n    block: int\n"
    )
    (tmp_path / "sampling_params.py").write_text(
        "class SamplingParams(Base):\n    logit_bias: dict | None = None\n    min_p: float\n"
    )
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("setting", "name", "refused"),
    [
        ("engine_options", "block", ""),
        ("engine_options", "blok", "rollout.engine_options.blok: vLLM has no such option; nearest: block"),
        ("engine_options", "other", "rollout.engine_options.other: vLLM has no such option"),  # of another class
        ("sampling_options", "logit_bias", ""),
        (
            "sampling_options",
            "min_pp",
            "rollout.sampling_options.min_pp: vLLM has no such option; nearest: min_p, which rollout.min_p sets",
        ),
        ("sampling_options", "block", "rollout.sampling_options.block: vLLM has no such option"),
    ],
)
def test_names_of_options_are_those_of_vllms_classes(setting: str, name: str, refused: str) -> None:
    rollout = RolloutConfig.model_validate({setting: {name: 1}})
    if not refused:
        check_option_names(rollout)
        return
    with pytest.raises(ConfigError) as raised:
        check_option_names(rollout)
    assert str(raised.value) == refused


def test_without_vllm_all_names_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_option_names(RolloutConfig(engine_options={"anything": 1}))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("min_pp", r"min_pp: vLLM has no such option; nearest: min_p, "),
        ("logit_bias", r"logit_bias: engines then draw"),
    ],
)
def test_a_mistyped_option_of_sampling_is_not_said_to_alter_the_distribution(name: str, said: str) -> None:
    tree = {"rollout": {"sampling_options": {name: 0.1}}}
    with pytest.raises(ConfigError, match=rf"rollout\.sampling_options\.{said}"):
        from_tree(tree)
    from_tree({**tree, "algorithm": {"rollout_correction": "tis"}})  # as a run of another vLLM was saved
