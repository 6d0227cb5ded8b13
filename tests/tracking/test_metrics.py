"""What is asked of MLflow directly: models are registered, stores that are not there are refused."""

import time
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.tracking import mlflow


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return mlflow.default_uri(tmp_path / "store")


def test_a_model_is_stored_with_its_run_and_registered_under_the_next_version(uri: str, tmp_path: Path) -> None:
    now = int(time.time() * 1000)
    run_id = mlflow.make_run(uri, "a key", "rlx", "run", parent=None, params={}, tags={}, at=now)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert [mlflow.register(uri, run_id, folder, "sums") for _ in range(2)] == ["1", "2"]
    door = mlflow.client(uri)
    version = door.get_model_version("sums", "2")
    assert version.run_id == run_id and version.source.endswith("/artifacts/model")
    assert [artifact.path for artifact in door.list_artifacts(run_id, "model")] == ["model/config.json"]


def test_a_server_that_is_not_there_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError) as error:
        mlflow.check_server("http://user:secret@127.0.0.1:9")
    assert str(error.value) == "tracking.uri http://127.0.0.1:9: connection refused"
