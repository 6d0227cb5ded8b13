"""Names of models on the hub are checked before Ray starts, with one quick connection."""

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlx.config.errors import ConfigError
from rlx.models.folder import ModelShape, check_hub_name, shape_on_hub


def test_a_model_is_taken_from_the_cache_or_refused_at_once_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    assert shape_on_hub("a/b") == ModelShape(None, None)
    with pytest.raises(ConfigError, match=r"^model\.path a/b: no folder here, not in the cache .*answer \(Conn"):
        check_hub_name("a/b", "model.path")
    cached = tmp_path / "models--a--b" / "snapshots" / "c0ffee" / "config.json"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("c0ffee")
    check_hub_name("a/b", "model.path")
    assert time.monotonic() - started < 2 and "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("name", ["a b", "-a/b"])
def test_what_cannot_be_a_name_is_refused_as_that(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path {name}: no folder here, and no model of the Hugging Face"):
        check_hub_name(name, "model.path")
