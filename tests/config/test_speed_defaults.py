"""Settings whose default depends on others, because they cost or save time."""

from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig


def config(**settings: Any) -> RunConfig:
    return from_tree(with_overrides({}, {key.replace("__", "."): value for key, value in settings.items()}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10),
        ({"rollout__logprobs_every": 3}, 3),
        ({"algorithm__rollout_correction": "tis"}, 1),
        ({"rollout__max_staleness": 1}, 1),
        ({"rollout__max_staleness": 1, "algorithm__rollout_correction": "none"}, 1),
        ({"algorithm__old_logprobs": "rollout", "rollout__logprobs_every": 3}, 1),
    ],
)
def test_engines_report_logprobs_wherever_training_needs_them(settings: dict[str, Any], expected: int) -> None:
    assert config(**settings).resolved_logprobs_every == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train__steps": 1000}, False),
        ({"train__steps": 1000, "scaling__use_gpu": True}, True),
        ({"train__steps": 99, "scaling__use_gpu": True}, False),
        ({"train__steps": 1000, "scaling__use_gpu": True, "train__compile": False}, False),
        ({"train__steps": 5, "train__compile": True}, True),
        ({"train__steps": 1000, "scaling__use_gpu": True, "scaling__num_workers": 2, "parallel__tp": 2}, False),
    ],
)
def test_long_runs_on_gpus_are_compiled(settings: dict[str, Any], expected: bool) -> None:
    assert config(**settings).resolved_compile is expected


def test_the_entropy_is_computed_for_a_bonus_or_on_request() -> None:
    assert not config().algorithm.needs_entropy
    assert config(algorithm__exact_entropy=True).algorithm.needs_entropy
    assert config(algorithm__entropy_coef=0.01).algorithm.needs_entropy


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"scaling__use_gpu": True, "model__dtype": "bfloat16"}, True),
        ({"scaling__use_gpu": True}, True),
        ({"scaling__use_gpu": True, "model__dtype": "float32"}, False),
        ({"scaling__use_gpu": True, "model__dtype": "bfloat16", "train__packing": False}, False),
        ({"train__packing": True}, True),
        ({"parallel__sp": 2, "scaling__num_workers": 2}, True),
    ],
)
def test_updates_in_half_precision_on_gpus_are_packed(settings: dict[str, Any], expected: bool) -> None:
    assert config(**settings).resolved_packing is expected


def test_torchs_kernel_for_packed_rows_needs_half_precision() -> None:
    with pytest.raises(ConfigError, match=r"train\.packing: GPUs need model.dtype bfloat16 for it"):
        config(scaling__use_gpu=True, train__packing=True, model__dtype="float32")
