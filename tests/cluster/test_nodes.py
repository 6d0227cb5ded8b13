"""What nodes lack: files that a trial reads are refused, models are copied."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rlx.cluster import nodes
from rlx.config.errors import ConfigError


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes a cluster of two nodes, of which the second has the file or not."""

    def make(has: bool) -> None:
        monkeypatch.setattr(nodes, "other_nodes", lambda: ["b"])
        monkeypatch.setattr(nodes, "_on", lambda node, function, *args: has)
        monkeypatch.setattr(nodes, "_result", lambda node, answer: answer)
        monkeypatch.setattr(nodes, "_title", lambda node: f"node 10.0.0.2 ({node})")

    return make


def test_a_file_that_a_node_lacks_is_refused_with_its_name(tmp_path: Path, second: Any) -> None:
    (file := tmp_path / "sums.jsonl").touch()
    second(False)
    with pytest.raises(ConfigError, match=rf"^data\.source {file}: node 10\.0\.0\.2 \(b\) does not have it\. Trials"):
        nodes.check_path(str(file), "data.source")
    second(True)
    nodes.check_path(str(file), "data.source")


def test_an_address_that_is_no_file_here_is_left_to_the_nodes(second: Any) -> None:
    second(False)
    for address in ("s3://bucket/sums.jsonl", "hf:openai/gsm8k@train", "reasoning_gym:leg_counting", ""):
        nodes.check_path(address, "data.source")


# ---------------------------------------------------------------------------------------------------------------------
# Model folders


class Disks:
    """A cluster whose other nodes have folders of this machine for disks, below which they see the path they are given.

    Functions that are called on a node run here, with its path for the driver's; `refuses`: the node where they fail.
    """

    def __init__(self, home: Path, *names: str) -> None:
        self.home, self.names, self.refuses = home, names, ""

    def place(self, node: str, path: str) -> Path:
        return self.home / node / Path(path).relative_to("/")

    def on(self, node: str, function: Any, *args: Any) -> Callable[[], Any]:
        def call() -> Any:
            if node == self.refuses and function is nodes._unpack:
                raise ray.exceptions.RayTaskError("unpack", "", PermissionError("read-only"))
            try:
                return function(*args[:-1], str(self.place(node, args[-1])))
            except ConfigError as error:
                raise ray.exceptions.RayTaskError("unpack", "", error) from None

        return call


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    made = Disks(tmp_path / "nodes", "b", "c")
    monkeypatch.setattr(nodes, "other_nodes", lambda: list(made.names))
    monkeypatch.setattr(nodes, "_on", made.on)
    monkeypatch.setattr(nodes, "_result", lambda node, call: call())
    monkeypatch.setattr(nodes, "_title", lambda node: f"node {node}")
    monkeypatch.setattr(ray, "put", lambda content: content)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts" / "weights").write_bytes(bytes(range(256)))
    return folder


def test_a_model_is_copied_whole_to_the_nodes_that_lack_it(model: Path, disks: Disks) -> None:
    own = disks.place("b", str(model))
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    nodes.bring_folder(str(model), "model.path")
    copy = disks.place("c", str(model))
    assert (copy / "parts" / "weights").read_bytes() == bytes(range(256))
    assert sorted(path.name for path in copy.rglob("*")) == [".copied-by-rlx", "config.json", "parts", "weights"]
    assert [path.name for path in copy.parent.iterdir()] == ["model"]  # nothing unfinished is beside it
    assert not (own / "parts").exists()  # what models are read from is the same there


def test_a_copy_of_a_model_that_has_changed_since_is_made_anew(model: Path, disks: Disks) -> None:
    weights, stride = model / "model.safetensors", nodes._STRIDE
    weights.write_bytes(bytes(stride) + b"before")
    nodes.bring_folder(str(model), "model.path")
    weights.write_bytes(bytes(stride) + b"later!")  # as many bytes
    nodes.bring_folder(str(model), "model.path")
    for node in disks.names:
        copy = disks.place(node, str(model))
        assert (copy / "model.safetensors").read_bytes()[stride:] == b"later!"
        assert [path.name for path in copy.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["modeling_mine.py", "parts/config.json"])
def test_a_model_whose_code_or_inner_files_have_changed_is_copied_again(name: str, model: Path, disks: Disks) -> None:
    (model / name).write_text("A = 1")
    nodes.bring_folder(str(model), "model.path")
    (model / name).write_text("A = 2")
    nodes.bring_folder(str(model), "model.path")
    for node in disks.names:
        assert (disks.place(node, str(model)) / name).read_text() == "A = 2"


def test_a_folder_without_a_config_is_copied_too(model: Path, disks: Disks) -> None:
    (model / "config.json").unlink()
    nodes.bring_folder(str(model), "model.path")
    assert (disks.place("c", str(model)) / "parts" / "weights").is_file()


def test_a_node_alone_does_not_read_its_models(model: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    disks.names = ()
    monkeypatch.setattr(nodes, "_digest", None)
    nodes.bring_folder(str(model), "model.path")


def test_another_model_of_a_nodes_own_is_named_and_stays(model: Path, disks: Disks) -> None:
    own = disks.place("b", str(model))
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"of": "b"}')
    with pytest.raises(ConfigError, match="node b: it has another model there: remove that one"):
        nodes.bring_folder(str(model), "model.path")
    assert (own / "config.json").read_text() == '{"of": "b"}'


def test_a_snapshot_of_the_hubs_cache_is_copied_though_it_is_made_of_links(model: Path, disks: Disks) -> None:
    snapshot = model.with_name("snapshot")
    snapshot.mkdir()
    for name in ("config.json", "weights"):
        target = model / name if name == "config.json" else Path("..", "model", "parts", "weights")
        (snapshot / name).symlink_to(target)
    nodes.bring_folder(str(snapshot), "model.path")
    copy = disks.place("b", str(snapshot))
    assert (copy / "weights").read_bytes() == bytes(range(256)) and not (copy / "weights").is_symlink()


def test_a_model_that_is_too_large_to_be_copied_is_refused_before_it_is_read(
    model: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_LARGEST_COPY", 2**20)
    with (model / "large").open("wb") as file:
        file.truncate(3 * 2**20)
    with pytest.raises(ConfigError) as raised:
        nodes.bring_folder(str(model), "model.path")
    lacking = "node b does not have it, or has another one, and 3 MiB are too many to be copied"
    assert str(raised.value) == f"model.path {model}: {lacking}"
    assert not disks.home.exists()


def test_a_node_that_cannot_be_written_is_named_with_its_reason(model: Path, disks: Disks) -> None:
    disks.refuses = "c"
    with pytest.raises(ConfigError) as raised:
        nodes.bring_folder(str(model), "reward.path")
    assert str(raised.value) == f"reward.path {model}: it cannot be copied to node c: read-only"


def test_a_name_on_the_hub_is_left_to_the_nodes(disks: Disks) -> None:
    nodes.bring_folder("org/model", "model.path")
    assert not disks.home.exists()


def test_a_folder_that_another_process_has_made_meanwhile_stays(model: Path, tmp_path: Path) -> None:
    content, there = nodes._packed(model), tmp_path / "there"
    there.mkdir()
    (there / "config.json").write_text("{}")
    nodes._unpack(content, nodes._digest(str(model)), str(there))
    assert [path.name for path in there.iterdir()] == ["config.json"]


def test_a_folder_that_is_something_else_is_an_error_and_stays(model: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        nodes._unpack(nodes._packed(model), nodes._digest(str(model)), str(there))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there"]
    assert [path.name for path in there.iterdir()] == ["mine"]


@pytest.mark.slow
def test_an_actor_that_starts_where_the_model_is_not_has_it_nevertheless(
    model: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reader:
        """An actor that reads a model when it starts."""

        def __init__(self, model: Path, bring: Callable[[], None]) -> None:
            bring()
            self.found = (model / "parts" / "weights").read_bytes()

        def read(self) -> bytes:
            return self.found

    copies = nodes.FolderCopies.of([str(model), str(model), "org/model"])
    assert list(copies.digests) == [str(model)]
    copy = model.with_name("copy")
    monkeypatch.setattr(nodes, "_LARGEST_COPY", 16)
    assert nodes.FolderCopies.of([str(model)]).digests == {}
    reader = ray.remote(Reader).options(num_cpus=0, max_restarts=1, max_task_retries=1)
    # One disk is that of all nodes here: the store reads the folder, which is then away when the actor starts.
    ray.get(copies.store.content.remote(str(model)))
    model.rename(copy)
    actor = reader.remote(model, copies.bring_here)
    assert ray.get(actor.read.remote()) == bytes(range(256)) and model.is_dir()
    shutil.rmtree(model)
    ray.kill(actor, no_restart=False)
    end = time.monotonic() + 60
    while not model.is_dir() and time.monotonic() < end:  # the kill may come after a call
        assert ray.get(actor.read.remote()) == bytes(range(256))
    assert model.is_dir()
