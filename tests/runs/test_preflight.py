"""What is found wrong with a run before any of it starts: models, prompt files, rewards, servers, the disk."""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections import RewardConfig, TrackingConfig
from rlx.rewards.custom import RewardError
from rlx.runs import preflight, run_folder
from rlx.storage.filesystem import Storage, StorageError


def test_a_model_must_be_divisible_by_the_gpus_that_it_is_split_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 14}')
    split = {"rollout.tensor_parallel": 4, "rollout.resources_per_engine.GPU": 4}
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel 4 does not divide the 14 attention heads"):
        preflight.check_model(from_tree(with_overrides({}, split)), str(tmp_path))


@pytest.mark.parametrize("setting", ["data.source", "data.ptx_source", "eval.source"])
def test_a_missing_prompt_file_is_refused_before_a_model_is_created(setting: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}')
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
    with (
        pytest.raises(RewardError, match=r"ValueError.*'Ann'.* at .*tried_rewards\.py:1.*; in full in ") as failed,
        run_folder.keeping_details(Storage.local(tmp_path)),
    ):
        preflight.try_rewards(rewards, rows, on_gpu=False)
    (details,) = tmp_path.glob("reward_error_*.txt")
    assert str(details) in str(failed.value) and "Traceback" in details.read_text() and '"Ann"' in details.read_text()
    preflight.try_rewards(rewards, rows, on_gpu=True)
    assert "need not be like those of the workers: reward " in caplog.text


def model_folder(folder: Path, **files: bytes) -> str:
    """A model's folder with these files beside its config; a__b names a.b."""
    for name, content in {"config__json": b"{}", **files}.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model__safetensors": b""}, r"it has no tokenizer \(tokenizer.json\): "),
        ({"tokenizer__json": b"{}"}, r"it has no weights \(model.safetensors\): "),
        ({"tokenizer__json": b"version https://git-lfs", "model__safetensors": b""}, "damaged, or not downloaded"),
    ],
)
def test_a_model_that_lacks_a_file_is_refused(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path, **files)
    with pytest.raises(ConfigError, match=rf"^model\.path {path}.*{message}"):
        preflight.check_model(from_tree({}), path)


def test_a_model_whose_checkpoint_fills_the_disk_is_refused_and_its_adapters_are_not(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]}}).encode()
    weights = struct.pack("<Q", len(header)) + header
    path = model_folder(tmp_path, tokenizer__json=b"{}", model__safetensors=weights)
    tree = {"storage": str(tmp_path / "new" / "storage")}
    with pytest.raises(StorageError, match=r"MiB are free on its disk, and a checkpoint of this model takes about 22,"):
        preflight.check_model(from_tree(tree), path)
    preflight.check_model(from_tree({**tree, "model": {"lora_rank": 8}}), path)


def test_a_server_that_is_down_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^tracking\.uri http://127\.0\.0\.1:9: no server answers there \(.*refused"):
        preflight.check_tracking(TrackingConfig(uri="http://127.0.0.1:9"))


def test_a_tracking_address_of_no_kind_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^tracking\.uri postgres://db: MLflow knows no postgres; nearest: postgresql$"
    ):
        preflight.check_tracking(TrackingConfig(uri="postgres://db"))
    for uri in (None, "sqlite:///x.db", "postgresql+psycopg2://u@h/db", "mlruns"):
        preflight.check_tracking(TrackingConfig(uri=uri))


def test_the_quick_checks_import_nothing_slow() -> None:
    """Each of them takes seconds to import: `rlx train` would refuse nothing within two."""
    code = (
        "import sys\nfrom rlx.cli.train import main\nfrom rlx.sweeps import choices\n"
        "code = main(['--data.source', 'nosuch.csv', '--data.params', '{}', '--storage', sys.argv[1]])\n"
        "slow = {'ray', 'torch', 'mlflow', 'transformers', 'pandas', 'reasoning_gym', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'{code} {slow}' if code != 1 or slow else 0)"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "error: data.source nosuch.csv: no such file\n", done.stderr
