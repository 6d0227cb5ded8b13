"""Which checkpoint of which run a person means, what is inherited from it, and whether a run can start from it."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

import rlx
from rlx.api import resume as api_resume
from rlx.cli import export, train
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig, sections
from rlx.data.record import PUT_BACK, prompt_record
from rlx.data.stream import Share, TableRows
from rlx.runs import launch, preflight, run_folder
from rlx.runs.launch import Parent
from rlx.runs.preflight import PreparedRun, plan_resources
from rlx.runs.processes import RunProcesses
from rlx.runs.run_folder import checkpoint_of
from rlx.samples.evaluations import HELD_OUT, EvaluationFile
from rlx.storage import checkpoint_catalog, claims, signatures
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.claims import ClaimedError
from rlx.storage.filesystem import Storage, StorageError
from rlx.storage.signatures import Signer
from rlx.tracking.changes import noted_changes

ROOT = Path(__file__).resolve().parents[2]
STEPS = {5: 0.2, 10: 0.9, 15: 0.5}
"""the checkpoints of a made-up run, and their accuracy"""


def settings(**changes: Any) -> dict[str, Any]:
    """A run's config tree, with changes such as train__steps."""
    given = {"name": "a"} | {key.replace("__", "."): value for key, value in changes.items()}
    return from_tree(with_overrides({}, given)).model_dump(mode="json")


def put(folder: Path | str, step: int, accuracy: float = 0.0, signature: str = "", **changes: Any) -> CheckpointEntry:
    """A checkpoint with a file that is none of safetensors: nobody reads it here."""
    place = open_storage(str(folder), create=False) / checkpoint_catalog.checkpoint_name(step)
    file = place / "rank_00000.safetensors"
    file.write_text("x")
    manifest = Manifest(
        rlx="0", step=step, ranks=1, metrics={"eval/accuracy": accuracy, "loss": accuracy}, tokens=0, kl={}, scores={},
        cursor={}, evaluation={}, mlflow_run_id=None, config=settings(**changes), signature=signature,
        files={file.name: checkpoint_catalog.file_record(file)},
    )  # fmt: skip
    checkpoint_catalog.commit(place, manifest)
    return checkpoint_catalog.read_checkpoint(place)


def made(folder: Path, **changes: Any) -> Path:
    """A run's folder with three checkpoints."""
    for step, accuracy in STEPS.items():
        put(folder, step, accuracy, **changes)
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "1"}))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(**changes)))
    return folder


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A storage whose path has an @ in it, with the run a."""
    made(tmp_path / "me@work" / "runs" / "a")
    return tmp_path / "me@work"


@pytest.mark.parametrize(
    ("which", "step"),
    [
        ("a", 15),
        ("a@newest", 15),
        ("a@best", 10),
        ("a@5", 5),
        ("a@step_000010", 10),
        ("{}/runs/a", 15),
        ("{}/runs/a/", 15),
        ("{}/runs/a@best", 10),
        ("{}/runs/a@5", 5),
        ("{}/runs/a/step_000005", 5),
        ("{}/runs/a/step_000005/", 5),
        ("file://{}/runs/a@best", 10),
        ("file://{}/runs/a/step_000005", 5),
    ],
)
def test_a_checkpoint_has_many_names(which: str, step: int, storage: Path) -> None:
    address, found = run_folder.checkpoint_of(which.format(storage), str(storage))
    assert found.step == step and found.manifest
    assert address.rstrip("/").endswith(f"{storage}/runs/a/{found.name}")
    assert checkpoint_catalog.read_checkpoint(open_storage(address, create=False)) == found  # the address leads there


def test_a_run_of_before_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    """Its folder has all settings, so that new defaults change nothing."""
    text = (ROOT / "tests" / "config" / "old_run.yaml").read_text()
    folder = tmp_path / "runs" / "before"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    (folder / "run.json").write_text(json.dumps({"mlflow_run": "1"}))
    with run_folder.saved_run("before", str(tmp_path), {"train.steps": 80}, trust=True) as (config, _, _):
        assert (config.train.steps, config.train.actor_lr, config.algorithm.gae_lambda) == (80, 1e-4, 0.95)
        assert not config.train.shuffle_minibatches  # for which there was no setting
        assert (config.rollout.max_tokens, config.data.max_prompt_tokens, config.model.dtype) == (16, 128, "float32")
    put(folder, 40, 0.5)
    assert run_folder.checkpoint_of("before@best", str(tmp_path))[1].step == 40


@pytest.mark.parametrize(
    ("changes", "engines", "each"),
    [
        ({"train.steps": 80}, 4, {"CPU": 1.0, "GPU": 1.0}),
        ({"scaling.num_workers": 2}, 2, {"CPU": 1.0, "GPU": 1.0}),
        ({"scaling.num_workers": 2, "rollout.num_engines": 3}, 3, {"CPU": 1.0, "GPU": 1.0}),
        ({"scaling.use_gpu": False}, 1, {"CPU": 0.5}),
        ({"rollout.placement": "colocated"}, 4, {"CPU": 0.5}),
        ({"rollout.tensor_parallel": 2}, 2, {"CPU": 1.0, "GPU": 2.0}),
    ],
)
def test_engines_with_their_defaults_follow_what_a_resume_changes(
    changes: dict[str, Any], engines: int, each: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path / "runs" / "a", scaling__use_gpu=True, scaling__num_workers=4, train__prompts_per_step=32)
    with run_folder.saved_run("a", str(tmp_path), changes, trust=True) as (config, _, _):
        assert (config.rollout.num_engines, config.rollout.resources_per_engine) == (engines, each)
        assert config.model.dtype == "bfloat16"  # which a resume cannot change
    moved = engines != 4 or "GPU" not in each
    own = "rollout.num_engines" in changes
    assert caplog.text.count("defaults that follow what was given: rollout.") == (moved and not own)


@pytest.mark.parametrize("each", [{"CPU": 1.0, "GPU": 0.5}, {"CPU": 0.5, "GPU": 0.0}])
def test_engines_stay_on_a_resume_if_what_one_takes_was_given(
    each: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path / "runs" / "a", scaling__use_gpu=True, rollout__resources_per_engine=each)
    with run_folder.saved_run("a", str(tmp_path), {"scaling.num_workers": 4}, trust=True) as (config, _, _):
        assert (config.rollout.num_engines, config.rollout.resources_per_engine) == (1, each)
    assert not caplog.messages


@pytest.mark.parametrize("changes", [{"seed": 5}, {"train.steps": 15}], ids=["refused", "finished"])
def test_engines_of_a_run_that_does_not_go_on_are_not_spoken_of(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = made(tmp_path / "runs" / "a", scaling__use_gpu=True)
    (folder / "result.json").write_text(json.dumps({"step": 15}))
    given = {"scaling.num_workers": 2, **changes}
    with suppress(ConfigError), run_folder.saved_run("a", str(tmp_path), given, trust=True) as (config, _, metrics):
        assert metrics and config.rollout.num_engines == 2
    assert not caplog.messages


def test_a_relative_folder_becomes_an_address_that_holds_anywhere(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(storage)
    for which in ("runs/a@5", "./runs/a/step_000005"):
        assert run_folder.checkpoint_of(which, "elsewhere")[0] == f"{storage}/runs/a/step_000005"


@pytest.mark.slow
def test_a_checkpoint_on_s3_is_named_alike(bucket: str, s3_server: str) -> None:
    query = f"?endpoint_override={s3_server}"
    folder = open_storage(bucket) / "runs" / "a"
    for step in (5, 10):
        put(f"{bucket}/runs/a", step, step / 10)
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(checkpoint__best_mode="min")))
    for which, storage, step in (
        ("a", bucket + query, 10),
        ("a@best", bucket + query, 5),
        (f"{bucket}/runs/a/step_000005{query}", "x", 5),
        (f"{bucket}/runs/a{query}", "x", 10),
        (f"{bucket}/runs/a{query}@best", "x", 5),
    ):
        address, found = checkpoint_of(which, storage)
        assert (address, found.step) == (f"{bucket}/runs/a/step_{step:06d}{query}", step)


def test_checkpoints_that_were_copied_beside_a_model_are_found(tmp_path: Path) -> None:
    put(tmp_path, 10)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for which in (f"{tmp_path}", f"{tmp_path}@10"):
        assert run_folder.checkpoint_of(which, "elsewhere")[1].step == 10


def test_the_best_is_by_what_the_run_says(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "b", checkpoint__best_by="loss", checkpoint__best_mode="min")
    assert run_folder.checkpoint_of("b@best", str(tmp_path))[1].step == 5


@pytest.mark.parametrize(
    ("which", "kind", "said"),
    [
        ("b", ConfigError, "no run 'b' in "),
        ("b@5", ConfigError, "no run 'b' in "),
        ("b" * 300, ConfigError, "no run 'bbb"),
        ("a\0b", ConfigError, r"no run 'a\x00b' in "),
        ("{}/" + "b" * 300, StorageError, ": a file's name has 255 bytes at most, and one here 300"),
        ("a@7", StorageError, "no checkpoint 7 in "),
        ("a@step_000020", StorageError, "no checkpoint step_000020 in "),
        ("{}/runs/b", StorageError, "no complete checkpoint in "),
        ("{}/runs/a/step_000020", ConfigError, "is not complete: there are no files"),
    ],
)
def test_what_is_not_there_is_one_line(which: str, kind: type[Exception], said: str, storage: Path) -> None:
    before = sorted(storage.rglob("*"))
    with pytest.raises(kind) as refused:
        run_folder.checkpoint_of(which.format(storage), str(storage))
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(storage.rglob("*")) == before


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("./nothere", "/nothere: there is no such folder"),
        ("{}/export", "/export: it is the folder of a model; --model.path {}/export trains it, transformers loads it"),
        ("{}/export@best", "/export: it is the folder of a model; --model.path {}/export trains it"),
        ("export", "/export: it is the folder of a model; --model.path {}/export trains it, transformers loads it"),
        ("{}/adapters", "/adapters: it has only adapters of a model; --from continues those of a run"),
        ("{}/models", "/models: it holds models (tiny-1); --model.path {}/models/tiny-1 trains one"),
        ("{}/runs", "/runs: it holds runs (a); give one of them, e.g. {}/runs/a"),
    ],
)
def test_a_folder_that_is_something_else_is_named_as_that(
    which: str, said: str, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("export/config.json", "adapters/adapter_config.json", "models/tiny-1/config.json", "models/notes.txt"):
        (storage / name).parent.mkdir(parents=True, exist_ok=True)
        (storage / name).write_text("{}")
    monkeypatch.chdir(storage)
    with pytest.raises(StorageError) as refused:
        run_folder.checkpoint_of(which.format(storage), str(storage))
    assert str(refused.value).startswith(f"no complete checkpoint in {storage}{said.replace('{}', str(storage))}")
    made(storage / "runs" / "export")
    assert run_folder.checkpoint_of("export", str(storage))[1].step == 15  # a run has precedence


# ---------------------------------------------------------------------------------------------------------------------


def test_settings_are_inherited(tmp_path: Path) -> None:
    said: list[str] = []
    found = put(tmp_path, 5, seed=7, train__steps=31, model__lora_rank=4, storage="elsewhere")
    tree = run_folder.inherited_settings(found, said.append)
    assert from_tree(tree) == from_tree(settings(seed=7, train__steps=31, model__lora_rank=4, storage="elsewhere"))
    assert said == []


@pytest.mark.parametrize(
    ("given", "dtype"), [({}, "bfloat16"), ({"checkpoint.init_state": "all"}, "float32")], ids=["weights", "all"]
)
def test_a_new_run_takes_the_defaults_that_follow_what_it_is_given(
    given: dict[str, Any], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state of a run depends on its dtype, which stays if all of the state is taken."""
    made(tmp_path / "runs" / "a", model__path="org/name", algorithm__clip_low=0.1, rollout__max_tokens=96)
    given |= {"storage": str(tmp_path), "algorithm.policy_loss": "gspo", "scaling.use_gpu": True}
    config = train.new_config(None, given, "a", trust=True)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.model.dtype) == (0.1, 4e-4, dtype)
    assert config.algorithm.aggregation == "sequence_mean" and config.rollout.max_tokens == 96
    of_dtype = ", model.dtype bfloat16" if dtype == "bfloat16" else ""
    assert capsys.readouterr().out == (
        "defaults that follow what was given: algorithm.aggregation sequence_mean, algorithm.clip_high 0.0004"
        f"{of_dtype}, rollout.resources_per_engine {{'CPU': 1.0, 'GPU': 1.0}}\n"
    )
    plain = train.new_config(None, {"storage": str(tmp_path)}, "a", trust=True)
    assert (plain.algorithm.clip_high, plain.model.dtype, capsys.readouterr().out) == (0.2, "float32", "")


URL = {"reward__functions": {"url": 1.0}, "reward__url": "http://evil.example"}
CODE = {"reward__functions": {"evil:score": 1.0}}


def test_limits_of_programs_are_powers() -> None:
    """A stranger's weights would else write programs, and a stranger's run say how much they may use."""
    reward = {"functions": {"code": 1}, "code_memory_mb": 10**6, "code_processes": 10**6, "timeout_s": 1e6}
    assert set(signatures.powers({"reward": reward})) == {
        "reward.code_memory_mb",
        "reward.code_processes",
        "reward.timeout_s",
    }


def test_parameters_of_generated_prompts_that_may_name_a_file_are_powers() -> None:
    assert "data.params" in signatures.powers({"data": {"params": {"data_file": "/etc/passwd"}}})
    assert "data.params" not in signatures.powers({"data": {"params": {"min_terms": 3, "allow_negation": True}}})


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"model__trust_remote_code": True}, {"model.trust_remote_code": False}),
        (URL, {"reward.url": None}),
        (URL | {"reward__url_key_env": "AWS_SECRET_ACCESS_KEY"}, {"reward.url": None, "reward.url_key_env": None}),
        ({"tracking__uri": "http://evil.example"}, {"tracking.uri": None}),
        ({"tracking__backends": ["mlflow", "wandb"]}, {"tracking.backends": ("mlflow",)}),
        ({"ray_address": "evil.example:1"}, {"ray_address": None}),
        (CODE, {"reward.functions": {"task": 1.0}}),
        ({"model__path": "evil/weights"}, {"model.path": "tiny"}),
        ({"data__source": "/etc/passwd.csv", "data__params": {}}, {"data.source": "reasoning_gym:chain_sum"}),
        ({"reward__answer_pattern": "(a+)+$"}, {"reward.answer_pattern": None}),
        ({"checkpoint__init_from": "/evil"}, {"checkpoint.init_from": None}),
        ({"rollout__engine_options": {"kv_transfer_config": "{}"}}, {"rollout.engine_options": {}}),
        ({"rollout__sampling_options": {"skip_reading_prefix_cache": True}}, {"rollout.sampling_options": {}}),
        ({"reward__answer_pattern": "reasoning_gym:(a+)+$"}, {"reward.answer_pattern": None}),
    ],
)
def test_what_a_stranger_could_use_is_not_inherited_and_said(
    changes: dict[str, Any], left: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    found = put(tmp_path, 5, train__steps=31, **changes)
    before = settings(train__steps=31, **changes)
    assert run_folder.inherited_settings(found, said.append) == with_overrides(before, left)
    assert said == [
        f"settings not taken from step_000005, which this user did not write: {', '.join(left)}. "
        f"Give them again, or --trust to take all"
    ]
    assert found.manifest and found.manifest.config == before  # what was read stays as it is
    assert run_folder.inherited_settings(found, said.append, trust=True) == before
    own = put(tmp_path, 6, signature=Signer.new().sign(before), train__steps=31, **changes)
    assert run_folder.inherited_settings(own, said.append) == before and len(said) == 1


def test_every_setting_that_names_code_models_addresses_or_patterns_counts_as_such() -> None:
    free = "|".join(("Address", "Pattern", "Arguments", "url_key_env", "judge_model", "functions", "SourceConfig"))
    own = {"storage", "data.chat_template_args"}  # where a run lies; what its model's template may do without
    declared = {"": RunConfig, **{f"{name}.": section for name, section in sections().items()}}
    found = {
        f"{prefix}{key}"
        for prefix, section in declared.items()
        for key in section.model_fields
        if re.search(rf"\b({free})\b", f"{key} {section.__annotations__[key]}") or key.endswith("url_key_env")
    }
    assert found - own <= set(signatures.POWERFUL)


def test_an_export_runs_no_code_and_uses_no_address_of_a_stranger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = {"model__path": "evil/weights", "model__trust_remote_code": True, "tracking__uri": "http://evil.example"}
    found = put(tmp_path, 5, **evil, **URL)
    args = export._argument_parser().parse_args([str(tmp_path)])
    config = export.run_config(args, str(tmp_path), found)
    assert (config.model.trust_remote_code, config.tracking.uri, config.model.path) == (False, None, "evil/weights")
    assert "not taken from step_000005, which this user did not write: model.trust_remote_code, tracking.uri" in (
        capsys.readouterr().out
    )
    trusting = export._argument_parser().parse_args([str(tmp_path), "--trust"])
    assert export.run_config(trusting, str(tmp_path), found) == from_tree(settings(**evil, **URL))


@pytest.mark.parametrize(
    ("name", "hint"), [("my model:ü", "; nearest: my-model-ü"), ("a/b", "; nearest: a-b"), ("", "")]
)
def test_a_name_that_mlflow_does_not_take_is_refused_before_the_export(
    name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is not even looked for."""
    assert export.main(["gone", "--storage", str(tmp_path), "--register", name]) == 1
    expected = f"error: --register {name}: MLflow takes no name with / or : and no empty one{hint}\n"
    assert capsys.readouterr().err == expected
    export.check_model_name("my model-ü")


def test_a_checkpoint_does_not_choose_the_storage_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was moved, or somebody else has written it: its model is that of the storage it lies in, or of a given one."""
    used = list[str]()
    monkeypatch.setattr(preflight, "model_folder", lambda path, storage: used.append(storage) or "no such model")
    run, given = tmp_path / "s" / "sweeps" / "lr" / "runs" / "a", str(tmp_path / "x")
    for folder in (run, tmp_path / "a copy"):
        put(folder, 5, storage="/victim")
        for storage in (None, given):
            with pytest.raises(ConfigError, match="no such model"):
                rlx.load_model(folder / "step_000005", storage=storage)
            args = export._argument_parser().parse_args([f"{folder}@5", *(["--storage", storage] if storage else [])])
            used.append(export.run_config(args, *run_folder.checkpoint_of(args.run, "")).storage)
    above = str(tmp_path / "s")
    assert used == [above, above, given, given, *[RunConfig().storage] * 2, given, given]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the databases in which models are registered; models, and MLflow, would take long to show."""
    folders = list[str]()
    monkeypatch.setattr("rlx.runs.export.export", lambda *_: 0.0)
    monkeypatch.setattr("rlx.tracking.services.mlflow.get_run", lambda *_: None)
    monkeypatch.setattr(export, "registered", lambda uri, *_: folders.append(str(Path(uri[10:]).parent)) or "1")
    return folders


def recorded_at(folder: Path, signature: str = "", **changes: Any) -> str:
    """A checkpoint that MLflow has a run of; returns its folder."""
    entry = put(folder, 5, signature=signature, **changes)
    assert entry.manifest
    checkpoint_catalog.commit(entry.folder, entry.manifest.model_copy(update={"mlflow_run_id": "1"}))
    return entry.folder.path


def with_database(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "mlflow.db").touch()


def test_a_copied_checkpoint_is_registered_where_its_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: list[str]
) -> None:
    """Not somebody else's: who wrote it would choose the database."""
    monkeypatch.chdir(tmp_path)
    names = ("written", "given", "moved", "storage")
    written, given, moved, usual = (tmp_path / name for name in names)
    with_database(written, given, moved, usual)
    tree = {"name": "a", "storage": str(written)}
    places = {"copy": Signer.new().sign(settings(**tree)), "other": "x:y", "moved/runs/a": ""}
    for place, signature in places.items():
        checkpoint = recorded_at(tmp_path / place, signature, **tree)
        for words in ((), ("--trust",), ("--trust", "--storage", str(given))):
            assert export.main([checkpoint, "--register", "m", "--out", f"{tmp_path}/out", *words]) == 0
    here = [written, written, given, usual, written, given, moved, moved, given]
    assert registered == [str(each) for each in here]
    (written / "mlflow.db").unlink()  # the storage was moved
    assert export.main([f"{tmp_path}/copy/step_000005", "--register", "m", "--out", f"{tmp_path}/out"]) == 0
    assert registered[-1] == str(usual)


@pytest.mark.parametrize("recorded", ["s3://bucket/rlx", "private/store", "no/such/folder"])
def test_a_storage_that_cannot_be_looked_into_is_not_where_a_copied_checkpoint_is_registered(
    recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    usual, given = tmp_path / "storage", tmp_path / "given"
    with_database(usual, given, tmp_path / "private" / "store")
    seen = Path.is_file

    def look(path: Path) -> bool:
        if "private" in path.parts:  # root may look anywhere
            raise PermissionError(path)
        return seen(path)

    monkeypatch.setattr(Path, "is_file", look)
    tree = {"storage": recorded if "://" in recorded else f"{tmp_path}/{recorded}"}
    for place, found in (("copied", usual), ("given/runs/x", given)):
        checkpoint = recorded_at(tmp_path / place, **tree)
        words = ("--register", "m", "--out", f"{tmp_path}/out", "--trust")
        assert export.main([checkpoint, *words]) == 0 and registered[-1] == str(found)
        assert export.main([checkpoint, *words, "--storage", str(given)]) == 0 and registered[-1] == str(given)
        uri = f"sqlite:///{given}/mlflow.db"
        checkpoint = recorded_at(tmp_path / place, **tree, tracking__uri=uri)
        assert export.main([checkpoint, *words, "--storage", f"{tmp_path}/gone"]) == 0 and registered[-1] == str(given)


def test_a_model_whose_run_mlflow_does_not_have_is_refused_before_the_export(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlx.runs.export.export", lambda *_: pytest.fail("it was exported"))
    (tmp_path / "given").mkdir()
    shutil.copy(empty_database, tmp_path / "given")
    words = [recorded_at(tmp_path / "copy"), "--register", "m", "--out", f"{tmp_path}/out", "--storage"]
    for name, said in (("given", "Run with id=1 not found"), ("gone", "there is no such database")):
        assert export.main([*words, f"{tmp_path}/{name}"]) == 1
        line = f"error: --register m: MLflow at sqlite:///{tmp_path}/{name}/mlflow.db: {said}; --storage names another"
        assert capsys.readouterr().err.startswith(line)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--register", "m"], "--register m: MLflow has no run of this checkpoint: "),
        ([], "exports/a-step_000015 exists already: --out names another folder\n"),
        (["--out", "mine"], "--out mine exists already: give another folder, or delete it\n"),
        (
            ["--out", "mine", "--register", "m"],
            "--out mine exists already: give another folder, or delete it; --register",
        ),
    ],
)
def test_what_an_export_cannot_do_is_said_before_it(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "storage" / "runs" / "a", name="a")
    for folder in ("mine", "exports/a-step_000015"):
        (tmp_path / folder / "model").mkdir(parents=True)
    assert export.main(["a", *words]) == 1
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_a_resume_without_a_whole_checkpoint_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_catalog, "SECOND_READ_S", 0.0)
    folder = Storage.local(made(tmp_path / "runs" / "a"))
    for name in ("notes", ".DS_Store"):
        (tmp_path / "runs" / name).write_text("of a desktop")
        with pytest.raises(ConfigError, match=f"^no run '{name}' in "):
            run_folder.find(name, str(tmp_path))
    for checkpoint in checkpoint_catalog.list_checkpoints(folder):
        (checkpoint.folder / "rank_00000.safetensors").write_text("damaged")
    line = r"^run 'a' has no whole checkpoint in .*: the newest, step_\d+, cannot be used: .* has 7 bytes, not 1; put"
    with pytest.raises(ConfigError, match=line), run_folder.saved_run("a", str(tmp_path), {}):
        pass
    assert train._way_on(folder, str(tmp_path)) == ""


def test_checkpoints_that_a_network_shows_late_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file system shows old sizes for a while, or an old list of what a folder holds."""
    folder = Storage.local(made(tmp_path / "runs" / "a"))
    checkpoint_catalog.mark_saved(folder)
    whole, waits = tmp_path / "whole", list[float]()

    def become_visible(seconds: float) -> None:
        waits.append(seconds)
        shutil.copytree(whole, folder.path, dirs_exist_ok=True)

    monkeypatch.setattr("time.sleep", become_visible)
    shutil.copytree(folder.path, whole)
    for entry in checkpoint_catalog.list_checkpoints(folder):
        (entry.folder / "rank_00000.safetensors").write_text("")
    run_folder._check_checkpoints(folder)
    for entry in checkpoint_catalog.list_checkpoints(folder):
        entry.folder.delete()
    run_folder._check_checkpoints(folder)
    run_folder._check_checkpoints(folder)  # which is whole, and waits for nothing
    assert waits == [checkpoint_catalog.SECOND_READ_S] * 2
    for entry in checkpoint_catalog.list_checkpoints(folder):
        entry.folder.delete()
    (folder / checkpoint_catalog.SAVED).delete()  # as in runs of before, of which only a result tells
    (folder / "result.json").write_text('{"step": 15}')
    run_folder._check_checkpoints(folder)
    assert len(waits) == 3


def test_a_refusal_of_what_a_stranger_wrote_is_one_short_line(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "a", reward__answer_pattern="(a)\n" * 5000)
    with pytest.raises(ConfigError) as refused, run_folder.saved_run("a", str(tmp_path), {}):
        pass
    assert len(str(refused.value)) < 1000


def test_a_run_of_another_person_is_resumed_when_what_it_names_is_trusted_or_given(tmp_path: Path) -> None:
    folder = made(tmp_path / "runs" / "a", **CODE)
    given: dict[str, Any]
    for given, trust in (({}, True), ({"reward.functions": {"task": 1.0}}, False)):
        with run_folder.saved_run("a", str(tmp_path), given, trust=trust) as (config, _, _):
            assert config.reward.functions == given.get("reward.functions", {"evil:score": 1.0})
    with (
        pytest.raises(ConfigError, match=r"this user did not write run 'a', .*: reward.functions {'evil:score': 1.0}"),
        run_folder.saved_run("a", str(tmp_path), {}),
    ):
        pass
    (folder / "signature").write_text(Signer.new().sign(settings(**CODE)))
    with run_folder.saved_run("a", str(tmp_path), {}) as (config, _, _):
        assert config.reward.functions == {"evil:score": 1.0}


# ---------------------------------------------------------------------------------------------------------------------


def starting(place: Path | str, init_state: str = "all", **changes: Any) -> RunConfig:
    return from_tree(settings(name="b", checkpoint__init_from=str(place), checkpoint__init_state=init_state, **changes))


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        run_folder.check_start(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_run_starts_from_a_checkpoint_that_fits(tmp_path: Path) -> None:
    run_folder.check_start(RunConfig(name="b"))
    place = put(tmp_path, 5, train__steps=5).folder.path
    run_folder.check_start(starting(place, train__steps=6, train__prompts_per_step=16))
    run_folder.check_start(starting(place, "weights", train__steps=3, seed=9))  # its own steps, its own prompts


def test_only_a_new_run_is_refused_for_seeds_of_a_set(tmp_path: Path) -> None:
    config = from_tree({"eval": {"sets": [{"name": "s", "source": "reasoning_gym:chain_sum", "seed": 5}]}})
    assert refusal(config).startswith("eval.sets s: its seed (5) is too close to that of data.source (0)")
    run_folder.check_start(config, is_new=False)


def test_only_a_new_run_is_refused_for_several_splits_in_a_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    place, prompts = put(tmp_path, 5).folder.path, {"data__source": str(tmp_path)}
    for config in (from_tree(settings(**prompts)), starting(place, "weights", **prompts)):
        assert refusal(config).startswith(f"data.source {tmp_path}: it has files of several splits")
        run_folder.check_start(config, is_new=False)
    place = put(tmp_path, 5, **prompts).folder.path
    run_folder.check_start(starting(place, "all", **prompts))  # whose prompts cannot change


@pytest.mark.parametrize(("then", "now"), [(0, 4), (4, 0), (4, 8)])
def test_no_run_takes_weights_of_other_adapters(then: int, now: int, tmp_path: Path) -> None:
    place = put(tmp_path, 5, model__lora_rank=then).folder.path
    said = f"model.lora_rank is {then} in checkpoint {place}, not {now}: rlx export makes a folder of its model, and "
    assert refusal(starting(place, "weights", model__lora_rank=now)) == f"{said}--model.path starts from that"
    run_folder.check_start(starting(place, "weights", model__lora_rank=then))


def test_a_checkpoint_that_has_a_start_of_its_own_is_one_to_start_from(tmp_path: Path) -> None:
    place = put(tmp_path, 5, checkpoint__init_from="/elsewhere/step_000001", train__steps=5).folder.path
    run_folder.check_start(starting(place, train__steps=6))


@pytest.mark.parametrize("init_state", ["weights", "all"])
def test_no_run_starts_from_what_is_not_whole(init_state: str, tmp_path: Path) -> None:
    place = put(tmp_path, 5).folder
    (place / "rank_00000.safetensors").write_text("xx")
    said = f"checkpoint {place} is not complete: rank_00000.safetensors has 2 bytes, not 1"
    assert refusal(starting(place.path, init_state)) == said
    said = f"checkpoint {tmp_path}/step_000006 is not complete: there are no files"
    assert refusal(starting(tmp_path / "step_000006", init_state)) == said
    assert not (tmp_path / "step_000006").exists()


def test_no_run_starts_after_its_last_step(tmp_path: Path) -> None:
    place = put(tmp_path, 5, train__steps=5).folder.path
    for steps in (4, 5):
        said = f"train.steps ({steps}) are all done at step 5: ask for more"
        assert refusal(starting(place, train__steps=steps)) == said


@pytest.mark.parametrize(
    ("change", "said"), [({"seed": 3}, "seed is 0 "), ({"model__lora_rank": 4}, "model.lora_rank is 0 ")]
)
def test_no_run_takes_the_state_of_one_that_was_another(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    place = put(tmp_path, 5, train__steps=5).folder.path
    assert refusal(starting(place, train__steps=6, **change)).startswith(f"{said}in run a, which cannot change now")


@pytest.mark.parametrize(
    ("now", "refused"),
    [("/there/prompts.jsonl", False), ("/there/others.jsonl", True), ("prompts.jsonl", True)],
)
def test_a_prompt_file_may_lie_elsewhere_when_a_run_goes_on(now: str, refused: bool) -> None:
    before, after = (from_tree({"name": "a", "data": {"source": each}}) for each in ("/here/prompts.jsonl", now))
    if not refused:
        run_folder.check_resumable(after, before)
        return
    with pytest.raises(ConfigError, match=r"data\.source is /here/prompts\.jsonl in run a, which cannot change now"):
        run_folder.check_resumable(after, before)


PLAIN, SUMS = {"source": "/here/q.jsonl", "name": "plain"}, {"source": "reasoning_gym:chain_sum", "name": "sums"}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([PLAIN | {"weight": 3}, SUMS], "data.sources plain.weight is 2.0 in"),
        ([PLAIN | {"weight": 2}, SUMS | {"params": {"max_terms": 3}}], "data.sources sums.params is None in"),
        ([PLAIN | {"weight": 2, "source": "/here/r.jsonl"}, SUMS], "data.sources plain.source is /here/q.jsonl in"),
        ([PLAIN | {"weight": 2}], "data.sources is plain, sums in"),
        ([], "data.sources is plain, sums in"),
        ([PLAIN | {"weight": 2, "source": "/there/q.jsonl"}, SUMS], None),  # on another machine
        ([PLAIN | {"weight": 2}, SUMS], None),
    ],
)
def test_a_source_that_changes_is_named_by_its_entry_and_setting(now: list[dict[str, Any]], said: str | None) -> None:
    sources = ([PLAIN | {"weight": 2}, SUMS], now)
    before, after = (from_tree({"name": "a1", "data": {"sources": each}}) for each in sources)
    if not said:
        run_folder.check_resumable(after, before)
        return
    with pytest.raises(ConfigError) as refused:
        run_folder.check_resumable(after, before)
    assert str(refused.value) == f"{said} run a1, which cannot change now: start a new run"


def test_new_runs_get_names_of_their_own_and_leave_none_behind(tmp_path: Path) -> None:
    config = from_tree({"storage": str(tmp_path)})
    with run_folder.new_run(config) as (first, folder), run_folder.new_run(config) as (second, _):
        assert (first.name, second.name) == ("ppo-1", "ppo-2")
        (folder / "run.json").write_text("{}")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["ppo-1"]
    with run_folder.new_run(config) as (third, _):
        assert third.name == "ppo-2"


def test_a_run_that_exists_is_not_begun_anew_nor_left_claimed(storage: Path) -> None:
    config = from_tree({"storage": str(storage), "name": "a"})
    with pytest.raises(ConfigError, match=r"run 'a' exists in .*: --resume a continues it"), run_folder.new_run(config):
        pass
    assert not list((storage / "runs" / "a").glob("owner*"))


class NoProcesses(RunProcesses):
    """The processes of a run that must not begin."""

    @contextmanager
    def lease(self, prepared: PreparedRun) -> Iterator[Any]:
        yield None


@pytest.mark.parametrize("state", ["resume", "held out", "all"])
def test_a_run_goes_on_with_its_own_prompts_or_changes_nothing(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "rows_of", TableRows)
    saw, has = (pa.table({"token_ids": [[each], [2]], "answer": ["1", "2"]}) for each in (1, 3))
    folder = open_storage(str(made(tmp_path / "a"))) if state != "all" else open_storage(str(tmp_path / "b"))
    entry = put(folder.path if state != "all" else tmp_path / "a", 20)
    assert entry.manifest
    cursor = Share(TableRows(saw)).stream(seed=0).cursor()
    checkpoint_catalog.commit(entry.folder, entry.manifest.model_copy(update={"cursor": cursor}))
    config = RunConfig(name="a") if state != "all" else starting(entry.folder.path, train__steps=40)
    tables = {"train": saw, "held_out": has} if state == "held out" else {"train": has}
    (folder / "prompts.json").write_text(prompt_record(config.data, config.eval, {"held_out": TableRows(saw)}))
    ready = PreparedRun(config, "model", plan_resources(config), tables=tables)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        ConfigError, match=rf"^data\.source reasoning.*: their texts or tokens differ: {re.escape(PUT_BACK)}$"
    ):
        launch.run(ready, folder, resume=state != "all", parent=Parent(folder), notify=print, processes=NoProcesses())
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("table", "which"), [("train", "prompts"), ("held_out", "held-out prompts")])
@pytest.mark.parametrize("from_start", [True, False])
def test_a_replay_has_the_prompts_of_its_run_or_leaves_nothing(
    from_start: bool, table: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "rows_of", TableRows)
    saw, has = (pa.table({"token_ids": [[each], [2]], "answer": ["1", "2"]}) for each in (1, 3))
    recorded, folder = open_storage(str(made(tmp_path / "a"))), open_storage(str(tmp_path / "b"))
    start = f"{tmp_path}/a/step_000010"
    config = from_tree(settings(name="b")) if from_start else starting(start, train__steps=40)
    rows = {"train": TableRows(saw), "held_out": TableRows(saw)}
    (recorded / "prompts.json").write_text(prompt_record(config.data, config.eval, rows))
    tables = {"train": saw, "held_out": saw} | {table: has}
    ready = PreparedRun(config, "model", plan_resources(config), tables=tables, replayed=recorded)
    said = rf"^data\.source reasoning.*: its {which} are not those of run a, which cannot change now: their texts or"
    with pytest.raises(ConfigError, match=said):
        launch.run(ready, folder, parent=Parent(folder), notify=print, processes=NoProcesses())
    assert not (folder / "config.yaml").exists()


def test_what_an_interrupted_start_has_left_is_no_run(storage: Path) -> None:
    runs = storage / "runs"
    (runs / "half").mkdir()
    (runs / "half" / "provenance.json").write_text("{}")
    said = f"run 'half' in {runs} has not begun, its start was interrupted: rlx train --name half begins it"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"), run_folder.saved_run("half", str(storage), {}):
        pass
    with pytest.raises(ConfigError, match=f"^no run 'halv' in {runs}$"):  # it is not the nearest one
        checkpoint_of("halv", str(storage))


@pytest.mark.parametrize("name", ["a copy", "_old", "läuft"])
def test_a_run_whose_folder_was_renamed_is_found_by_that_name(name: str, storage: Path) -> None:
    """No run can begin with such a name."""
    runs = storage / "runs"
    shutil.copytree(runs / "a", runs / name)
    assert run_folder.locate(name, str(storage))[1].path == f"{runs}/{name}"
    assert checkpoint_of(f"{name}@10", str(storage))[0] == f"{runs}/{name}/step_000010"
    valid = {"a copy": "a-copy", "_old": "old", "läuft": "l-uft"}[name]
    said = f"^run '{name}' goes on by no such name: rename {runs}/{name} to {valid} first$"
    with pytest.raises(ConfigError, match=said), run_folder.saved_run(name, str(storage), {}):
        pass
    (runs / name / "run.json").unlink()
    with pytest.raises(ConfigError, match=f"^no run '{name}' in {runs}"):
        run_folder.locate(name, str(storage))


def test_a_run_that_another_process_starts_is_named_as_that(storage: Path) -> None:
    """It lies in its folder once its model is made and its processes are started."""
    runs = storage / "runs"
    with claims.take(open_storage(str(runs / "new")), "run 'new'"):
        said = rf"^run 'new' in {runs} is being started by process {os.getpid()} of .* \(last sign 0 s ago\)$"
        for use in (checkpoint_of, run_folder.locate):
            with pytest.raises(ConfigError, match=said):
                use("new", str(storage))
        with pytest.raises(ConfigError, match=rf"^no run in {runs}/new: it is being started by process {os.getpid()}"):
            run_folder.locate(str(runs / "new"), "")
    assert not (runs / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"name": "other"}, "name other: run 'a' keeps its name; --from a starts another one"),
        ({"storage": "elsewhere"}, "storage elsewhere: run 'a' stays where it is, which is looked for in {}"),
    ],
)
def test_a_resume_neither_moves_nor_renames_a_run(overrides: dict[str, str], said: str, storage: Path) -> None:
    for resume in (run_folder.saved_run, partial(api_resume, quiet=True)):
        with pytest.raises(ConfigError) as refused:
            resume("a", storage=str(storage), overrides=overrides).__enter__()
        assert str(refused.value) == said.format(storage)
    with run_folder.saved_run("a", str(storage), {"name": "a", "storage": str(storage)}):  # as the command line says
        pass


@pytest.mark.parametrize("left", ["nothing", "files without manifests"])
@pytest.mark.parametrize(("record", "text"), [("result.json", '{"step": 21}'), (checkpoint_catalog.SAVED, "")])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    record: str, text: str, left: str, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_catalog, "SECOND_READ_S", 0.0)
    folder = storage / "runs" / "a"
    for step in STEPS:
        (folder / f"step_{step:06d}" / "manifest.json").unlink()
        if left == "nothing":
            shutil.rmtree(folder / f"step_{step:06d}")
    (folder / record).write_text(text)
    said = rf"^run 'a' has had checkpoints, and none of them is left in {folder}: put one back"
    with pytest.raises(ConfigError, match=said), run_folder.saved_run("a", str(storage), {"train.steps": 90}):
        pass
    put(folder, 10)
    with run_folder.saved_run("a", str(storage), {"train.steps": 90}):
        pass


def test_a_finished_run_whose_checkpoints_are_gone_has_its_result(storage: Path) -> None:
    folder = storage / "runs" / "a"
    for step in STEPS:
        shutil.rmtree(folder / f"step_{step:06d}")
    (folder / "result.json").write_text('{"step": 21}')
    with run_folder.saved_run("a", str(storage), {"train.steps": 21}) as (_, _, metrics):
        assert metrics == {"step": 21}


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """However many steps it has done, and whatever the resumes before have made of checkpoint.every."""
    folder = tmp_path / "runs" / "a"
    (folder / "step_000010").mkdir(parents=True)
    (folder / "step_000010" / "rank_00000.safetensors").touch()
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / str(EvaluationFile(50, HELD_OUT))).touch()
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(checkpoint__every=2, train__steps=900)))
    with run_folder.saved_run("a", str(tmp_path), {"checkpoint.every": 1}):
        pass


def test_a_resume_without_a_checkpoint_says_that_the_run_begins_again(tmp_path: Path) -> None:
    said: list[str] = []
    folder, now = open_storage(str(tmp_path)), settings(train__actor_lr=2e-3)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings()))
    launch._go_on(folder, now, said.append)
    assert said == ["no checkpoint yet: the run begins again with its first step"]
    assert noted_changes(folder) == {0: ["train.actor_lr"]}
    put(tmp_path, 5)
    launch._go_on(folder, now, said.append)
    assert len(said) == 1
    launch._go_on(folder, settings(train__steps=4), said.append)
    assert said[1:] == [
        f"train.steps is 4, and was {now['train']['steps']}: what has been logged of later steps stays logged"
    ]


def test_a_run_is_continued_by_one_at_a_time(storage: Path) -> None:
    with run_folder.saved_run("a", str(storage), {"train.steps": 30}) as (config, folder, metrics):
        assert (config.train.steps, folder.name, metrics) == (30, "a", None)
        with pytest.raises(ClaimedError, match="run 'a' is in use by"), run_folder.saved_run("a", str(storage), {}):
            pass
        begun_again = from_tree({"storage": str(storage), "name": "a"})
        with pytest.raises(ClaimedError, match="run 'a' is in use by"), run_folder.new_run(begun_again):
            pass
    with run_folder.saved_run("a", str(storage), {}):
        pass
