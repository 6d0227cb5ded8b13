"""Names of models on the hub are checked before Ray starts, with one quick connection."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rlx.config.errors import ConfigError
from rlx.models.folder import ModelShape, check_hub_name, check_model_files, is_model_folder, shape_on_hub


def test_a_model_is_taken_from_the_cache_or_refused_at_once_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    assert shape_on_hub("a/b") == ModelShape()
    with pytest.raises(ConfigError, match=r"^model\.path a/b: no folder here, not in the cache .*answer \(Conn"):
        check_hub_name("a/b", "model.path")
    cached = tmp_path / "models--a--b" / "snapshots" / "c0ffee" / "config.json"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("c0ffee")
    check_hub_name("a/b", "model.path")
    assert time.monotonic() - started < 2 and "".join(capfd.readouterr()) == ""


def test_sizes_that_are_no_single_number_say_nothing(tmp_path: Path) -> None:
    sizes = {"hidden_size": [64, 128], "n_embd": 128, "num_attention_heads": [4, 8], "max_position_embeddings": None}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert ModelShape.read(str(tmp_path)) == ModelShape(width=128)
    ModelShape.read(str(tmp_path)).check("m", positions=9, tensor_parallel=3, lora_rank=8)


@pytest.mark.parametrize("name", ["a b", "-a/b"])
def test_what_cannot_be_a_name_is_refused_as_that(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path {name}: no folder here, and no model of the Hugging Face"):
        check_hub_name(name, "model.path")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),  # Gemma 2
        ({"final_logit_softcapping": None}, None),  # Gemma 3
        ({"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping 30.0"),
        ({"logit_scale": 0.0625}, "logit_scale 0.0625"),  # Cohere
        ({"logit_scale": 1.0, "logits_scaling": 1, "text_config": None}, None),
        ({"logits_scaling": 8.0}, "logits_scaling 8.0"),  # Granite
    ],
)
def test_models_whose_config_says_that_they_change_their_logits_are_refused_before_they_are_loaded(
    content: dict[str, Any], named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "c0ffee"  # also a model of the hub in its cache
    folder.mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    check_model_files(str(folder), "model.critic_path")
    check_hub_name("a/b", "model.critic_path")
    if not named:
        check_model_files(str(folder), "model.path")
        check_hub_name("a/b", "model.path")
        return
    with pytest.raises(ConfigError, match=rf"^model\.path {folder}: {named} in its config\.json changes the logits of"):
        check_model_files(str(folder), "model.path")
    with pytest.raises(ConfigError, match=rf"^model\.reference_path a/b: {named} in its"):
        check_hub_name("a/b", "model.reference_path")


def test_a_folder_called_as_an_organisation_hides_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    assert not is_model_folder("Qwen/Qwen2.5-0.5B", "model.path")
    for path in ("./Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5/0.5B"):
        with pytest.raises(ConfigError, match="no such folder"):
            is_model_folder(path, "model.path")


@pytest.mark.parametrize(("file", "kind"), [("manifest.json", "a checkpoint of training"), ("run.json", "a run")])
def test_what_training_wrote_is_named_as_that(
    file: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step_000002"
    folder.mkdir()
    (folder / file).write_text("{}")
    for path, named in ((str(folder), str(folder)), ("step_000002", "./step_000002")):
        with pytest.raises(ConfigError) as refused:
            is_model_folder(path, "model.path")
        assert str(refused.value) == (
            f"model.path {path}: {kind}, not a model: rlx export {named} makes a folder of its model, "
            f"or --from {named} starts from it"
        )


@pytest.mark.parametrize("path", ["try1@best", "storage/runs/try1@5", "/storage/runs/try1@best"])
def test_a_checkpoint_by_name_is_no_model(path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^model\.path {path}: no such folder; of a check.*, rlx export {path} makes"
    ):
        is_model_folder(path, "model.path")


def test_a_folder_of_adapters_is_named_as_that(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=rf"^model\.path {tmp_path}: adapters of peft; rlx export without --adapter, or"
    ):
        is_model_folder(str(tmp_path), "model.path")
    (tmp_path / "config.json").write_text("{}")
    assert is_model_folder(str(tmp_path), "model.path")
