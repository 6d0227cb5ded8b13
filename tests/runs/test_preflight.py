"""What is found wrong with a run before any of it starts: the model's shape and missing prompt files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import RewardConfig
from rlx.runs import preflight


def test_a_model_must_be_divisible_by_the_gpus_that_it_is_split_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 14}')
    split = {"rollout.tensor_parallel": 4, "rollout.resources_per_engine.GPU": 4}
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel 4 does not divide the 14 attention heads"):
        preflight.check_model(from_tree(with_overrides({}, split)), str(tmp_path))


@pytest.mark.parametrize("setting", ["data.source", "data.ptx_source", "eval.source"])
def test_a_missing_prompt_file_is_refused_before_a_model_is_created(setting: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("{}")
    given = {"storage": str(tmp_path / "storage"), "data.source": str(tmp_path / "there.jsonl"), "data.params": {}}
    given |= {setting: str(tmp_path / "p.jsonl")} | ({"algorithm.ptx_coef": 0.1} if "ptx" in setting else {})
    with pytest.raises(ConfigError, match=rf"^{setting} .*p\.jsonl: no such file$"):
        preflight.prepare(from_tree(with_overrides({}, given)))
    assert not (tmp_path / "storage").exists()


def test_a_trial_on_another_machine_needs_no_prompt_file(tiny_model: Path, tmp_path: Path) -> None:
    given = {"storage": str(tmp_path), "data.source": str(tmp_path / "p.jsonl"), "data.params": {}}
    config = from_tree(with_overrides({}, given | {"model.path": str(tiny_model)}))
    assert preflight.prepare(config, tables={"train": None}).model_path == str(tiny_model)


def test_rewards_are_tried_before_a_start_and_only_warn_where_workers_have_gpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "def f(prompts, completions, answers): return [1.0, int(completions[1])]\n"
    (tmp_path / "tried_rewards.py").write_text(code)
    rewards = RewardConfig(functions={"tried_rewards:f": 1.0})
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "Who?", "answer": "Ann"}]
    table = SimpleNamespace(take=lambda count: rows[:count])
    with pytest.raises(ConfigError, match=r"ValueError.*'Ann'.* at .*tried_rewards\.py:1"):
        preflight.try_rewards(rewards, table, on_gpu=False)
    preflight.try_rewards(rewards, table, on_gpu=True)
    assert "need not be like those of the workers: reward " in caplog.text
