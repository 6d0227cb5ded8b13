"""What a run was made with: by checksum, written once while the run begins, and read again."""

import hashlib
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from replay_cases import run_of
from safetensors.torch import load_file, save_file

import rlx
from rlx.config.errors import ConfigError
from rlx.config.experiment import over_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.replay import verifying
from rlx.runs import launch, preflight
from rlx.runs.preflight import PreparedRun
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.tracking import provenance
from rlx.tracking.provenance import PROVENANCE, Provenance


def written(run: Storage, files: dict[str, list[Storage]]) -> Provenance:
    """What a run that begins now has written."""
    provenance.begin_record(run, files)
    for thread in threading.enumerate():
        if thread.name == "provenance":
            thread.join()
    found = provenance.read_provenance(run)
    assert found
    return found


def test_files_are_named_by_setting_with_their_checksums(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("one")
    (tmp_path / "b.bin").write_bytes(b"two")
    file, other = (open_storage(str(tmp_path)) / name for name in ("a.jsonl", "b.bin"))
    made = written(open_storage(str(tmp_path / "run")), {"data.source": [file], "model.path": [other]})
    sums = [hashlib.sha256(content).hexdigest() for content in (b"one", b"two")]
    assert made.files == {"data.source/a.jsonl": sums[0], "model.path/b.bin": sums[1]}
    assert made.rlx == rlx.__version__ and made.code == provenance.code_checksum() and len(made.code) == 64
    assert set(made.libraries) >= {"torch", "ray", "numpy"} and made.machine == provenance.machine_name()


def test_what_an_interrupted_start_has_left_is_replaced(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    first = written(run, {})
    (tmp_path / PROVENANCE).write_text(first.model_copy(update={"code": "of before"}).model_dump_json())
    assert written(run, {}) == first


def test_a_run_goes_on_with_its_own_weights_alone(tmp_path: Path) -> None:
    run, place = open_storage(str(tmp_path / "run")), tmp_path / "model"
    place.mkdir()
    (place / "model.safetensors").write_text("weights")
    (place / "README.md").write_text("text")
    files = {"model.path": [open_storage(str(place)) / name for name in ("model.safetensors", "README.md")]}
    provenance.check_same_weights(run, files)  # a run of before has no record
    written(run, files)
    (place / "README.md").write_text("other text")
    moved = open_storage(str(place.rename(tmp_path / "elsewhere")))
    now = {"model.path": [moved / name for name in moved.names()], "data.source": []}
    provenance.check_same_weights(run, now)
    (tmp_path / "elsewhere" / "model.safetensors").write_text("others")
    said = r"^model\.path: model\.safetensors is not what run run began with, which cannot change now: put back what"
    with pytest.raises(ConfigError, match=said):
        provenance.check_same_weights(run, now)


def test_a_run_goes_on_without_what_cannot_be_read(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    provenance.begin_record(run, {"model.path": [run / "gone.safetensors"]})
    for thread in threading.enumerate():
        if thread.name == "provenance":
            thread.join()
    assert provenance.read_provenance(run) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rlx": 1, "code": "a", "libraries": {}, "machine": ""}'])
def test_what_is_not_a_record_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / PROVENANCE).write_text(text)
    with pytest.raises(ConfigError, match=r"provenance\.json is damaged: it is not what rlx wrote"):
        provenance.read_provenance(open_storage(str(tmp_path)))


def prepared(model: Path, folder: Path, **changes: str) -> PreparedRun:
    """A run on prompts in a file."""
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"question": f"{i} + 1", "answer": f"{i + 1}"}) + "\n" for i in range(99))
    )
    tree = {"storage": str(folder / "storage"), "model.path": str(model), "data.source": str(folder / "sums.jsonl")}
    config = from_tree(over_experiment(with_overrides({}, tree | changes)))
    return preflight.prepare(config)


def test_models_and_prompts_of_a_run_are_files(tiny_model: Path, tmp_path: Path) -> None:
    files = launch.input_files(prepared(tiny_model, tmp_path))
    assert set(files) == {"model.path", "data.source"}
    assert [file.path for file in files["data.source"]] == [str(tmp_path / "sums.jsonl")]
    assert {file.name for file in files["model.path"]} >= {"model.safetensors", "config.json", "tokenizer.json"}
    generated = prepared(tiny_model, tmp_path, **{"data.source": "reasoning_gym:chain_sum"})
    assert set(launch.input_files(generated)) == {"model.path"}


def test_held_out_prompts_and_those_of_sets_are_files(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("held", "olympiad"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "1"}) + "\n")
    ready = prepared(tiny_model, tmp_path)
    sources = [
        {"source": str(tmp_path / "sums.jsonl"), "held_out": str(tmp_path / "held.jsonl")},
        {"source": "reasoning_gym:chain_sum"},
    ]
    sets = [{"name": "plain"}, {"name": "hard", "source": str(tmp_path / "olympiad.jsonl")}]
    tree = {"model.path": str(tiny_model), "data.sources": sources, "eval.sets": sets}
    files = launch.input_files(replace(ready, config=from_tree(with_overrides({}, tree))))
    named = {setting: [file.name for file in found] for setting, found in files.items() if setting != "model.path"}
    assert named == {
        "data.sources 0": ["sums.jsonl"],
        "data.sources 0.held_out": ["held.jsonl"],
        "eval.sets hard": ["olympiad.jsonl"],
    }


def test_files_of_settings_that_earlier_versions_did_not_record_are_no_difference(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text("one")
    here = provenance.made_here({"eval.source": [open_storage(str(tmp_path)) / "held.jsonl"]})
    (fact,) = verifying.facts_of_files(here.model_copy(update={"files": {}}), here)
    assert (fact.what, fact.recorded, fact.here, fact.agrees) == ("eval.source", "not recorded", "1 files", None)


def test_other_files_and_other_code_are_named(tiny_model: Path, tmp_path: Path) -> None:
    run, ready = run_of(tmp_path), prepared(tiny_model, tmp_path)
    unknown = verifying.facts(run, ready)
    assert [(fact.what, fact.agrees) for fact in unknown] == [
        ("made with", None),
        ("settings", True),
        ("checkpoints", True),
    ]
    made = written(run.folder, dict(launch.input_files(ready)))
    assert all(fact.agrees for fact in verifying.facts(run, ready))
    (tmp_path / "runs" / "a" / PROVENANCE).write_text(made.model_copy(update={"code": "0" * 64}).model_dump_json())
    ready = prepared(tiny_model, tmp_path)
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"question": "new", "answer": "1"}) + "\n")
    wrong = {fact.what: fact.here for fact in verifying.facts(run, ready) if not fact.agrees}
    assert set(wrong) == {"code of rlx", "data.source"}
    assert wrong["data.source"] == "not the same: sums.jsonl"


def test_a_resume_on_other_weights_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    run, ready = run_of(tmp_path), prepared(model, tmp_path)
    written(run.folder, dict(launch.input_files(ready)))
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    weights = load_file(model / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model\.path: model\.safetensors is not what run a began with"):
        launch.run(ready, run.folder, resume=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
