"""Addresses of storage, and files on a local one."""

import threading
from pathlib import Path

import pytest

from rlx.storage import StorageError, local_folder, open_storage


def test_a_folder_is_made_and_holds_files(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "new" / "deep"))
    assert storage.is_local
    file = storage / "runs" / "a.json"
    assert not file.exists()
    file.write_text('{"x": "ü"}')
    assert file.exists()
    assert file.read_text() == '{"x": "ü"}'
    assert file.read_json() == {"x": "ü"}
    assert (tmp_path / "new" / "deep" / "runs" / "a.json").read_text() == '{"x": "ü"}'


def test_names_are_sorted_and_none_where_nothing_is(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for name in ("b", "a", "c/inner"):
        (storage / name).write_text("")
    assert storage.names() == ["a", "b", "c"]
    assert (storage / "c").names() == ["inner"]
    assert (storage / "missing").names() == []


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    file = open_storage(str(tmp_path)) / "state"
    texts = ["a" * 200_000, "b" * 100_000]
    file.write_text(texts[0])

    def write() -> None:
        for i in range(100):
            file.write_text(texts[i % 2])

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert file.read_text() in texts
    writer.join()
    assert (tmp_path / "state").read_text() == texts[1]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}", "file://{}/"])
def test_a_folder_and_its_uri_are_the_same_storage(tmp_path: Path, form: str) -> None:
    storage = open_storage(form.format(tmp_path))
    assert storage.is_local
    assert storage.path == str(tmp_path)


def test_a_relative_folder_is_pinned_to_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("here").path == str(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/there").path == str(tmp_path / "there")


def test_what_needs_a_disk_lies_in_the_folder_or_beside_a_remote_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_folder(str(tmp_path / "a")) == tmp_path / "a"
    assert local_folder(f"file://{tmp_path}/a") == tmp_path / "a"
    assert local_folder("s3://bucket/a") == tmp_path / "storage"


@pytest.mark.parametrize("address", ["nowhere://bucket", "{}/file/below"])
def test_an_unusable_address_is_one_line_that_names_it(tmp_path: Path, address: str) -> None:
    (tmp_path / "file").write_text("no folder")
    address = address.format(tmp_path)
    with pytest.raises(StorageError) as refused:
        open_storage(address)
    assert str(refused.value).startswith(f"storage {address}: ")
    assert "\n" not in str(refused.value)
