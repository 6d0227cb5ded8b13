"""Checkpoints on a storage: their states, which are kept, and which is found by a name."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import s3

from rlx.storage import checkpoint_catalog, checkpoint_manifest
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import CheckpointEntry, CheckpointState, DamagedError, Retention
from rlx.storage.checkpoint_manifest import FileRecord, Manifest, OtherFormatError
from rlx.storage.filesystem import Storage, StorageError

FILES = {"rank_00000.safetensors": b"first shard", "rank_00001.safetensors": b"second"}


@pytest.fixture(params=["folder", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty folder for the checkpoints of a run."""
    return open_storage(str(tmp_path / "run") if request.param == "folder" else request.getfixturevalue("bucket"))


def manifest(step: int, **changes: Any) -> Manifest:
    """A manifest with a value in every field."""
    content = {
        "rlx": "0.1.0",
        "step": step,
        "ranks": 2,
        "metrics": {"reward/mean": 0.1},
        "tokens": 12345678901,
        "kl": {"coef": 0.05},
        "scores": {"count": 3.0, "mean": -0.25},
        "cursor": {"epoch": 1, "position": 17},
        "evaluation": {"eval/accuracy": 0.5},
        "mlflow_run_id": None,
        "config": {"name": "a", "train": {"steps": 3, "rates": [1e-6, None, True]}},
        "files": {},
    }
    return Manifest(**(content | changes))


def put(folder: Storage, step: int, files: dict[str, bytes] = FILES, **changes: Any) -> CheckpointEntry:
    """Makes a checkpoint, as a run does."""
    place = folder / checkpoint_catalog.checkpoint_name(step)
    for name, content in files.items():
        (place / name).write_text(content.decode())
    records = {name: checkpoint_catalog.file_record(place / name) for name in files}
    checkpoint_catalog.commit(place, manifest(step, files=records, **changes))
    return checkpoint_catalog.read_checkpoint(place)


def names(entries: list[CheckpointEntry]) -> list[str]:
    return [entry.name for entry in entries]


# ---------------------------------------------------------------------------------------------------------------------
# The manifest


def test_a_manifest_is_read_as_it_was_written() -> None:
    numbers = {"tenth": 0.1, "least": 5e-324, "third": 1 / 3, "large": 1.7976931348623157e308, "é/日本": -0.0}
    unusual = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    files = {"rank_00000.safetensors": FileRecord(bytes=2**40, sha256="0" * 64)}
    written = manifest(10, metrics=numbers | unusual, mlflow_run_id="ü😀", files=files)
    read = Manifest.from_json(written.to_json())
    assert math.isnan(read.metrics.pop("nan")) and math.isnan(written.metrics.pop("nan"))
    assert read == written
    assert {name: value.hex() for name, value in read.metrics.items()} == {
        name: value.hex() for name, value in (numbers | {"inf": math.inf, "-inf": -math.inf}).items()
    }


def test_a_manifest_is_read_from_a_storage_as_it_was_written(folder: Storage) -> None:
    written = manifest(3, mlflow_run_id="ü😀", metrics={"é": 1e-9})
    checkpoint_catalog.commit(folder / "step_000003", written)
    assert checkpoint_catalog.read_checkpoint(folder / "step_000003").manifest == written


def test_a_manifest_that_is_cut_anywhere_is_refused() -> None:
    text = manifest(3).to_json()
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"^manifest\.json "):
            Manifest.from_json(text[:length])


def test_no_flipped_bit_changes_a_manifest_unnoticed() -> None:
    """A flip in a blank between values, or of the e in 1e-06 to E, changes no value."""
    written = manifest(3, files={"rank_00000.safetensors": FileRecord(bytes=11, sha256="ab" * 32)})
    content, refused = written.to_json().encode(), 0
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            try:
                assert Manifest.from_json(damaged.decode()) == written
            except ValueError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 0.8 * 8 * len(content)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "5", '"a"', "[" * 100_000, '{"sha256": 1}', '["sha256"]'])
def test_a_text_that_is_no_manifest_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^manifest\.json ") as refused:
        Manifest.from_json(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def signed(content: dict[str, Any]) -> str:
    """A manifest text with a correct checksum over any content; computed here, not by the code under test."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps(content | {"sha256": hashlib.sha256(text.encode()).hexdigest()})


def test_the_checksum_covers_every_field() -> None:
    content = manifest(3).model_dump(mode="json")
    assert Manifest.from_json(signed(content)) == manifest(3)
    text = json.loads(signed(content))
    for key in content:
        with pytest.raises(ValueError, match=r"^manifest\.json "):
            Manifest.from_json(json.dumps(text | {key: "another"}))
        with pytest.raises(ValueError, match=r"^manifest\.json "):
            Manifest.from_json(json.dumps({name: value for name, value in text.items() if name != key}))


@pytest.mark.parametrize("number", [0, True, 2.0, "2", None, [1] * 100])
def test_a_manifest_with_an_impossible_format_is_refused(number: object) -> None:
    with pytest.raises(
        ValueError, match=r"^manifest\.json has format .{1,40}: this version of rlx reads format 2 only$"
    ):
        Manifest.from_json(signed(manifest(3).model_dump(mode="json") | {"format": number}))


@pytest.mark.parametrize("number", [1, 3])
def test_a_manifest_of_another_version_is_refused_with_the_version_that_wrote_it(number: int) -> None:
    content = manifest(3).model_dump(mode="json") | {"format": number, "rlx": "0.1.0"}
    text = f"manifest.json has format {number}, written by rlx 0.1.0: this version of rlx reads format 2 only"
    with pytest.raises(OtherFormatError) as refused:
        Manifest.from_json(signed(content))
    assert str(refused.value) == text
    with pytest.raises(OtherFormatError, match=r"written by rlx \?:"):
        Manifest.from_json(signed(content | {"rlx": [1]}))


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        ".hidden.safetensors",
        "..safetensors",
        ".safetensors",
        "",
        "x",
        "manifest.json",
        "x.safetensors\n",
        "é.safetensors",
    ],
)
def test_a_file_name_that_leads_elsewhere_is_refused_even_with_a_right_checksum(name: str) -> None:
    record = {"bytes": 1, "sha256": "0" * 64}
    content = manifest(3).model_dump(mode="json")
    assert list(Manifest.from_json(signed(content | {"files": {"x.safetensors": record}})).files) == ["x.safetensors"]
    with pytest.raises(ValueError, match=r"^manifest\.json: files\.") as refused:
        Manifest.from_json(signed(content | {"files": {name: record}}))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"step": -1}, "step"),
        ({"step": 3.0}, "step"),
        ({"ranks": 0}, "ranks"),
        ({"metrics": {"a": "0.5"}}, "metrics.a"),
        ({"files": {"a.safetensors": {"bytes": -1, "sha256": "0" * 64}}}, "files.a.safetensors.bytes"),
        ({"files": {"a.safetensors": {"bytes": 1, "sha256": "0" * 63}}}, "files.a.safetensors.sha256"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_an_impossible_field_is_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=rf"^manifest\.json: {where}: "):
        Manifest.from_json(signed(manifest(3).model_dump(mode="json") | change))


# ---------------------------------------------------------------------------------------------------------------------
# Complete, unfinished, damaged


@pytest.mark.slow
def test_checkpoints_are_listed_oldest_first_with_their_problems(folder: Storage) -> None:
    assert checkpoint_catalog.list_checkpoints(folder) == []
    for step in (3, 1000000, 20, 4, 5, 6):
        put(folder, step)
    (folder / "step_000004" / checkpoint_manifest.MANIFEST).delete()
    (folder / "step_000005" / "rank_00001.safetensors").delete()
    (folder / "step_000006" / "rank_00000.safetensors").write_text("first shar")
    for other in ("step_7", "step_000008.part", "Step_000009", "config.yaml"):
        (folder / other / "file").write_text("")
    assert [(entry.name, entry.step, entry.problem) for entry in checkpoint_catalog.list_checkpoints(folder)] == [
        ("step_000003", 3, ""),
        ("step_000004", 4, "no manifest.json: it was never finished"),
        ("step_000005", 5, "rank_00001.safetensors is missing"),
        ("step_000006", 6, "rank_00000.safetensors has 10 bytes, not 11"),
        ("step_000020", 20, ""),
        ("step_1000000", 1000000, ""),
    ]
    assert names(checkpoint_catalog.complete_checkpoints(folder)) == ["step_000003", "step_000020", "step_1000000"]
    complete, unfinished, damaged = CheckpointState.COMPLETE, CheckpointState.UNFINISHED, CheckpointState.DAMAGED
    states = [entry.state for entry in checkpoint_catalog.list_checkpoints(folder)]
    assert states == [complete, unfinished, damaged, damaged, complete, complete]
    assert [entry.bytes for entry in checkpoint_catalog.list_checkpoints(folder)] == [17, 0, 0, 0, 17, 17]


def test_a_manifest_that_cannot_be_read_is_a_problem_of_its_checkpoint_alone(folder: Storage) -> None:
    for step in (1, 2):
        put(folder, step)
    path = (folder / "step_000002" / checkpoint_manifest.MANIFEST).path
    with folder.filesystem.open_output_stream(path) as stream:
        stream.write(b"\xff\xfe")
    good, bad = checkpoint_catalog.list_checkpoints(folder)
    assert (good.problem, bad.manifest) == ("", None)
    assert "\n" not in bad.problem and bad.problem


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_complete(
    folder: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        put(folder, step)
    sizes = checkpoint_catalog._file_sizes

    def look(checkpoint: Storage) -> dict[str, int]:
        found = sizes(checkpoint)
        if checkpoint.name == "step_000001":
            (checkpoint / checkpoint_manifest.MANIFEST).delete()
        return found

    monkeypatch.setattr(checkpoint_catalog, "_file_sizes", look)
    first, second = checkpoint_catalog.list_checkpoints(folder)
    assert first.state is CheckpointState.UNFINISHED and second.manifest


@pytest.mark.slow
def test_a_checkpoint_cut_short_at_any_point_of_its_writing_is_not_complete(tmp_path: Path) -> None:
    made = put(open_storage(str(tmp_path / "made")), 7)
    order = [*FILES, checkpoint_manifest.MANIFEST]
    content = {name: Path(made.folder.path, name).read_bytes() for name in order}
    cut = open_storage(str(tmp_path / "cut"))
    folder = Path(cut.path, "step_000007")
    assert checkpoint_catalog.complete_checkpoints(cut) == []
    folder.mkdir()
    for name in order:
        for length in range(len(content[name])):
            (folder / name).write_bytes(content[name][:length])
            assert checkpoint_catalog.complete_checkpoints(cut) == [], f"{name} of {length} bytes"
        assert checkpoint_catalog.complete_checkpoints(cut) == []
        (folder / name).write_bytes(content[name])
    assert names(checkpoint_catalog.complete_checkpoints(cut)) == ["step_000007"]


def test_a_flipped_bit_in_a_file_is_found_and_the_file_named(folder: Storage) -> None:
    entry = put(folder, 3)
    checkpoint_catalog.verify(entry, FILES)
    (entry.folder / "rank_00001.safetensors").write_text("sebond")
    assert checkpoint_catalog.read_checkpoint(entry.folder).problem == ""  # names and sizes do not say
    checkpoint_catalog.verify(entry, ["rank_00000.safetensors"])
    with pytest.raises(
        DamagedError, match=r"^checkpoint step_000003: rank_00001\.safetensors is damaged: its checksum"
    ):
        checkpoint_catalog.verify(entry, FILES)
    (entry.folder / "rank_00001.safetensors").delete()
    with pytest.raises(DamagedError, match=r"^checkpoint step_000003: rank_00001\.safetensors is missing$"):
        checkpoint_catalog.verify(entry, FILES)


def test_a_folder_with_the_manifest_of_another_step_is_not_complete(folder: Storage) -> None:
    entry = put(folder, 3)
    for name in ("step_000004", "mine"):
        for file in entry.folder.names():
            (folder / name / file).write_text((entry.folder / file).read_text())
        found = checkpoint_catalog.read_checkpoint(folder / name)
        assert (found.manifest, found.problem) == (None, "its manifest is of step 3, its name is not")
        assert found.state is CheckpointState.DAMAGED
    assert names(checkpoint_catalog.complete_checkpoints(folder)) == ["step_000003"]


def test_a_checkpoint_of_another_format_is_an_error_and_not_damaged(folder: Storage) -> None:
    for step in (3, 4):
        put(folder, step)
    text = signed(manifest(4).model_dump(mode="json") | {"format": 1})
    (folder / "step_000004" / checkpoint_manifest.MANIFEST).write_text(text)
    for read in (
        lambda: checkpoint_catalog.list_checkpoints(folder),
        lambda: checkpoint_catalog.read_checkpoint(folder / "step_000004"),
    ):
        with pytest.raises(
            StorageError, match=r"step_000004: manifest\.json has format 1, written by rlx 0\.1\.0: this "
        ):
            read()
    assert (folder / "step_000004").names() == [checkpoint_manifest.MANIFEST, *FILES]


@pytest.mark.parametrize("bytes_there", [None, 5, 7])
def test_no_checkpoint_is_made_of_missing_files(bytes_there: int | None, folder: Storage) -> None:
    place = folder / "step_000003"
    (place / "rank_00000.safetensors").write_text("first")
    if bytes_there:
        (place / "rank_00001.safetensors").write_text("x" * bytes_there)
    there = place.names()
    records = {
        "rank_00000.safetensors": checkpoint_catalog.file_record(place / "rank_00000.safetensors"),
        "rank_00001.safetensors": FileRecord(bytes=6, sha256="0" * 64),
    }
    with pytest.raises(OSError, match=r"step_000003/rank_00001\.safetensors is not there as it was written: "):
        checkpoint_catalog.commit(place, manifest(3, files=records))
    assert place.names() == there and checkpoint_catalog.complete_checkpoints(folder) == []


def test_a_record_is_size_and_sha256(folder: Storage) -> None:
    (folder / "abc").write_text("abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert checkpoint_catalog.file_record(folder / "abc") == FileRecord(bytes=3, sha256=known)


def test_a_commit_deletes_the_files_of_an_earlier_attempt(folder: Storage) -> None:
    place = folder / "step_000003"
    for remains in ("rank_00007.safetensors", "manifest.json.damaged", "deep/file"):
        (place / remains).write_text("")
    put(folder, 3)
    assert place.names() == ["manifest.json", *FILES]
    put(folder, 3, {"rank_00000.safetensors": b"alone"})  # the same step once more, on fewer ranks
    assert place.names() == ["manifest.json", "rank_00000.safetensors"]
    assert names(checkpoint_catalog.complete_checkpoints(folder)) == ["step_000003"]


def test_a_checkpoint_that_is_set_aside_keeps_its_files(folder: Storage) -> None:
    entry = put(folder, 3)
    checkpoint_catalog.set_aside(entry)
    assert entry.folder.names() == ["manifest.json.damaged", *FILES]
    (found,) = checkpoint_catalog.list_checkpoints(folder)
    assert found.state is CheckpointState.SET_ASIDE and checkpoint_catalog.complete_checkpoints(folder) == []
    assert found.problem == "it was damaged, and has been set aside"
    put(folder, 3)
    assert names(checkpoint_catalog.complete_checkpoints(folder)) == ["step_000003"]


# ---------------------------------------------------------------------------------------------------------------------
# Which are kept, which is found


def rated(*values: float | None) -> list[CheckpointEntry]:
    """Complete checkpoints of steps 1, 2, ... with these rewards."""
    metrics = [{} if value is None else {"reward": value} for value in values]
    return [
        CheckpointEntry(
            Storage.local(Path(f"/run/step_{step:06d}")),
            step,
            CheckpointState.COMPLETE,
            manifest(step, metrics=of_step),
        )
        for step, of_step in enumerate(metrics, 1)
    ]


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ((0.1, 0.3, 0.2), "max", 2),
        ((0.1, 0.3, 0.2), "min", 1),
        ((0.3, 0.3, 0.2), "max", 2),  # the newest of equals
        ((0.3, 0.2, 0.2), "min", 3),
        ((math.nan, 0.1, math.nan), "max", 2),
        ((math.nan, 0.1, math.nan), "min", 2),
        ((None, -5.0, None), "max", 2),
        ((-math.inf, math.inf), "min", 1),
        ((math.nan, None), "max", None),
        ((), "max", None),
    ],
)
def test_the_best_has_the_best_metric(values: tuple[float | None, ...], mode: str, expected: int | None) -> None:
    found = checkpoint_catalog.best_checkpoint(rated(*values), "reward", mode)
    assert (found and found.step) == expected


def test_an_incomplete_checkpoint_is_not_the_best() -> None:
    low, high = rated(0.1, 0.9)
    broken = dataclasses.replace(high, state=CheckpointState.DAMAGED, manifest=None, problem="gone")
    assert checkpoint_catalog.best_checkpoint([low, broken], "reward", "max") == low


@pytest.mark.parametrize(
    ("keep", "by", "mode", "left"),
    [
        (None, None, "max", [1, 2, 3, 4, 5]),
        (None, "reward", "max", [1, 2, 3, 4, 5]),
        (1, None, "max", [5]),
        (2, None, "max", [4, 5]),
        (9, None, "max", [1, 2, 3, 4, 5]),
        (1, "reward", "max", [2, 5]),
        (2, "reward", "min", [3, 4, 5]),
        (1, "unknown", "max", [5]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    keep: int | None, by: str | None, mode: str, left: list[int], tmp_path: Path
) -> None:
    folder = open_storage(str(tmp_path))
    for step, reward in enumerate((0.1, 0.9, -0.5, 0.2, 0.3), 1):
        put(folder, step, metrics={"reward": reward})
    checkpoint_catalog.prune(folder, Retention(keep, by, mode))
    assert [entry.step for entry in checkpoint_catalog.complete_checkpoints(folder)] == left
    assert folder.names() == [checkpoint_catalog.checkpoint_name(step) for step in left]


def test_checkpoints_of_every_so_many_steps_are_kept(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for step in range(2, 18, 2):
        put(folder, step)
    checkpoint_catalog.prune(folder, Retention(1, every=4))
    assert [entry.step for entry in checkpoint_catalog.complete_checkpoints(folder)] == [4, 8, 12, 16]
    put(folder, 18)
    checkpoint_catalog.prune(folder, Retention(1, every=8))
    assert [entry.step for entry in checkpoint_catalog.complete_checkpoints(folder)] == [8, 16, 18]


@pytest.mark.slow
def test_unfinished_checkpoints_are_deleted_unless_they_may_still_be_written(folder: Storage) -> None:
    for step in range(1, 7):
        put(folder, step)
    for step in (1, 3, 6):  # 6: perhaps another is at it
        (folder / checkpoint_catalog.checkpoint_name(step) / checkpoint_manifest.MANIFEST).delete()
    (folder / "step_000004" / "rank_00000.safetensors").delete()
    (folder / "notes" / "mine").write_text("")
    checkpoint_catalog.prune(folder, Retention(2))
    assert folder.names() == ["notes", "step_000002", "step_000005", "step_000006"]
    assert names(checkpoint_catalog.complete_checkpoints(folder)) == ["step_000002", "step_000005"]


def test_nothing_is_deleted_while_no_checkpoint_is_complete(folder: Storage) -> None:
    for step in (1, 2):
        put(folder, step)
        (folder / checkpoint_catalog.checkpoint_name(step) / checkpoint_manifest.MANIFEST).delete()
    checkpoint_catalog.prune(folder, Retention(1))
    assert folder.names() == ["step_000001", "step_000002"]


def test_of_a_checkpoint_that_is_linked_here_only_the_link_is_deleted(tmp_path: Path) -> None:
    mine, other = (Storage.local(tmp_path / name) for name in ("mine", "other"))
    put(other, 1)
    put(mine, 2)
    (tmp_path / "mine" / "step_000001").symlink_to(tmp_path / "other" / "step_000001")
    assert names(checkpoint_catalog.complete_checkpoints(mine)) == ["step_000001", "step_000002"]
    checkpoint_catalog.prune(mine, Retention(1))
    assert mine.names() == ["step_000002"]
    assert names(checkpoint_catalog.complete_checkpoints(other)) == ["step_000001"]


def test_a_deletion_cut_short_leaves_nothing_that_looks_complete(s3_faults: tuple[str, s3.Proxy]) -> None:
    address, proxy = s3_faults
    folder = open_storage(address)
    for step in (1, 2):
        put(folder, step)
    proxy.asked.clear()
    proxy.fail("403", methods=["POST"])  # S3 deletes what is in a folder by a POST, a single file by DELETE
    with pytest.raises(OSError, match="injected"):
        checkpoint_catalog.prune(folder, Retention(1))
    proxy.heal()
    first, *_ = [request for request in proxy.asked if request.startswith(("DELETE", "POST"))]
    assert first.startswith("DELETE ") and first.endswith("/step_000001/manifest.json")
    assert (folder / "step_000001").names() == list(FILES)
    assert names(checkpoint_catalog.complete_checkpoints(folder)) == ["step_000002"]
    checkpoint_catalog.prune(folder, Retention(1))
    assert folder.names() == ["step_000002"]


def test_a_checkpoint_is_found_by_age_rating_step_or_name(folder: Storage) -> None:
    for step, reward in ((5, 0.1), (10, 0.9), (15, 0.5)):
        put(folder, step, metrics={"reward": reward})
    found = [
        checkpoint_catalog.find_checkpoint(folder, which, "reward", "max").step
        for which in ("newest", "best", "5", "step_000010")
    ]
    assert found == [15, 10, 5, 10]
    assert checkpoint_catalog.find_checkpoint(folder, "best", "reward", "min").step == 5


@pytest.mark.parametrize("damage", ["file", "set aside", "manifest"])
def test_a_damaged_checkpoint_gives_its_place_to_no_other_one_in_silence(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_storage(str(tmp_path))
    for step, reward in ((5, 0.1), (10, 0.5), (15, 0.9)):
        put(folder, step, metrics={"reward": reward})
    last = folder / "step_000015"
    if damage == "manifest":
        (last / checkpoint_manifest.MANIFEST).write_text("{}")
    elif damage == "file":
        (last / "rank_00000.safetensors").delete()
    else:
        checkpoint_catalog.set_aside(checkpoint_catalog.read_checkpoint(last))
    problem = checkpoint_catalog.read_checkpoint(last).problem
    which = "which may be the best" if damage == "manifest" else "the best"
    with pytest.raises(StorageError) as refused:
        checkpoint_catalog.find_checkpoint(folder, "best", "reward", "max")
    assert str(refused.value) == (
        f"checkpoint step_000015 in {tmp_path}, {which} by reward, cannot be used: {problem}; give another: newest, or "
        "the number of a step"
    )
    assert caplog.messages == []
    assert checkpoint_catalog.find_checkpoint(folder, "newest", "reward", "max").step == 10
    assert caplog.messages == [f"checkpoint step_000015 is not used, step_000010 is: {problem}"]
    if damage != "manifest":
        assert checkpoint_catalog.find_checkpoint(folder, "best", "reward", "min").step == 5  # another one is damaged


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("best", "no checkpoint in {} has accuracy: other steps measured it (eval.every)"),
        ("10", "checkpoint step_000010 in {} is not complete: rank_00000.safetensors is missing"),
        ("step_000015", "checkpoint step_000015 in {} is not complete: no manifest.json: it was never finished"),
        ("", "no checkpoint '' in {}, there are newest, best, step_000005, step_000020"),
        ("7", "no checkpoint 7 in {}, there are newest, best, step_000005, step_000020"),
        ("step_00005", "; nearest: step_000005"),
        ("newst", "; nearest: newest"),
    ],
)
def test_a_missing_checkpoint_is_answered_with_those_that_exist(which: str, text: str, tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    for step in (5, 10, 15, 20):
        put(folder, step)
    (folder / "step_000010" / "rank_00000.safetensors").delete()
    (folder / "step_000015" / checkpoint_manifest.MANIFEST).delete()
    with pytest.raises(StorageError) as refused:
        checkpoint_catalog.find_checkpoint(folder, which, "accuracy", "max")
    assert text.format(folder.path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_a_complete_checkpoint_each_problem_is_named(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    with pytest.raises(StorageError, match=rf"^no complete checkpoint in {tmp_path}$"):
        checkpoint_catalog.find_checkpoint(folder, "newest", "reward", "max")
    put(folder, 5)
    (folder / "step_000005" / checkpoint_manifest.MANIFEST).delete()
    with pytest.raises(
        StorageError, match=rf"^no complete checkpoint in {tmp_path} \(step_000005: no manifest\.json: "
    ):
        checkpoint_catalog.find_checkpoint(folder, "newest", "reward", "max")
