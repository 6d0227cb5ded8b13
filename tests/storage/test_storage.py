"""Addresses of storage, and files on a local one and on a real S3 server that fails when it is told to."""

import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
import s3
from pyarrow import fs

from rlx.storage import addresses
from rlx.storage.addresses import local_folder, open_storage, resolve_address
from rlx.storage.filesystem import (
    Storage,
    StorageError,
    check_writable,
    free_name,
    retry,
    rewrite_file,
    upload_file,
)


def test_a_folder_is_made_and_holds_files(tmp_path: Path) -> None:
    there = open_storage(str(tmp_path / "new" / "deep"))
    assert there.is_local
    file = there / "runs" / "a.json"
    assert not file.exists()
    file.write_text('{"x": "ü"}')
    assert file.exists()
    assert file.read_text() == '{"x": "ü"}'
    assert file.read_json() == {"x": "ü"}
    assert (tmp_path / "new" / "deep" / "runs" / "a.json").read_text() == '{"x": "ü"}'


def test_messages_show_an_address_that_can_be_pasted(tmp_path: Path) -> None:
    assert str(Storage(fs.S3FileSystem(region="us-east-1"), "bucket/x") / "runs") == "s3://bucket/x/runs"
    assert str(Storage.local(tmp_path) / "runs") == f"{tmp_path}/runs"


def test_names_are_sorted_and_empty_for_a_missing_folder(tmp_path: Path) -> None:
    there = open_storage(str(tmp_path))
    for name in ("b", "a", "c/inner"):
        (there / name).write_text("")
    assert there.names() == ["a", "b", "c"]
    assert (there / "c").names() == ["inner"]
    assert (there / "missing").names() == []


@pytest.mark.slow
def test_a_folder_is_listed_while_others_make_and_remove_it(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path / "run"))
    code = "import os, sys; print()\nwhile True: os.mkdir(sys.argv[1]); os.rmdir(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-uc", code, folder.path], stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert folder.names() == []
        other.kill()


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_a_page_of_another_user_keeps_its_owner_and_may_be_kept_from_others() -> None:
    """Also where nobody may replace it: in a folder such as /tmp, or in one that cannot be written."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared, read_only, own = (folder / each for each in ("shared", "read_only", "own"))
        for file, mode in ((shared, 0o666), (read_only, 0o444), (own, 0o600)):
            file.write_text("of before, and longer")
            file.chmod(mode)
        os.chown(own, 65534, 65534)
        for mode in (0o1777, 0o777, 0o755):
            folder.chmod(mode)
            os.seteuid(65534)
            try:
                rewrite_file(shared, b"page")
                rewrite_file(own, b"page")
                with pytest.raises(PermissionError, match=str(read_only)):
                    rewrite_file(read_only, b"page")
            finally:
                os.seteuid(0)
            assert (shared.read_text(), shared.stat().st_uid, own.read_text()) == ("page", 0, "page")
            assert read_only.read_text() == "of before, and longer"
            assert sorted(each.name for each in folder.iterdir()) == ["own", "read_only", "shared"]


def test_a_page_in_shared_memory_is_replaced_at_once() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder, "page.html")
        file.write_text("of before")
        with file.open() as reader:
            rewrite_file(file, b"page")
            assert (reader.read(), file.read_text()) == ("of before", "page")


def fetch(file: Storage, target: Path) -> None:
    with file.filesystem.open_input_stream(file.path) as stream:
        target.write_bytes(stream.read())


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}", "file://{}/"])
def test_a_folder_and_its_uri_are_the_same_storage(tmp_path: Path, form: str) -> None:
    there = open_storage(form.format(tmp_path))
    assert there.is_local
    assert there.path == str(tmp_path)


def test_a_relative_folder_is_pinned_to_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("here").path == str(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/there").path == str(tmp_path / "there")


def test_the_local_folder_is_the_storage_or_beside_a_remote_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_folder(str(tmp_path / "a")) == tmp_path / "a"
    assert local_folder(f"file://{tmp_path}/a") == tmp_path / "a"
    assert local_folder("s3://bucket/a") == tmp_path / "storage"


@pytest.mark.parametrize(
    ("address", "above"),
    [
        ("/a/storage/runs/ppo-1/step_000010", "/a/storage"),
        ("/a/runs/b/runs/ppo-1", "/a/runs/b"),
        ("/a/sweeps/lr/runs/lr-1/step_000010/", "/a"),
        ("s3://bucket/runs/ppo-1/step_000010?region=a", "s3://bucket?region=a"),
        ("s3://runs/a/runs/ppo-1", "s3://runs/a"),
        ("file:///a/runs/step_by_step", "file:///a"),
        ("s3://runs/ppo-1/step_000010", None),
        ("s3:///runs/ppo-1", None),
        ("file:///runs/ppo-1/step_000010", None),
        ("/runs/ppo-1/step_000010", None),
        ("/backup/runs/step_000010", None),
        ("s3://bucket/runs/step_000010?region=a", None),
        ("/backup/step_000010", None),
        ("/a/runs/good?", "/a"),
        ("/a/st?x/sweeps/b?/runs/good?/step_000010", "/a/st?x"),
    ],
)
def test_a_storage_above_a_run_is_a_folder_or_a_bucket(address: str, above: str | None) -> None:
    assert addresses.storage_above(address) == above


def test_a_folder_may_have_a_question_mark_in_its_name(tmp_path: Path) -> None:
    assert addresses.join_address(f"{tmp_path}/st?x", "runs", "a") == f"{tmp_path}/st?x/runs/a"
    assert addresses.without_options("s3://bucket/a?region=x") == "s3://bucket/a"


@pytest.mark.parametrize("address", ["nowhere://bucket", "gs://bucket", "s3:/bucket", "file:/tmp/x", "{}/file/below"])
def test_an_unusable_address_is_refused_in_one_line_that_names_it(tmp_path: Path, address: str) -> None:
    (tmp_path / "file").write_text("no folder")
    address = address.format(tmp_path)
    with pytest.raises(StorageError) as refused:
        open_storage(address)
    assert str(refused.value).startswith(f"storage {address}: ")
    assert "\n" not in str(refused.value)


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "there") if request.param == "folder" else request.getfixturevalue("bucket"))


def test_files_are_written_read_listed_and_deleted_anywhere(place: Storage) -> None:
    file = place / "runs" / "ü" / "a.json"
    assert (file.exists(), file.size(), place.names()) == (False, None, [])
    file.write_text('{"x": "ü"}')
    (place / "runs" / "b").write_text("")
    assert (file.exists(), file.size(), file.name) == (True, 11, "a.json")
    assert (file.read_text(), file.read_json()) == ('{"x": "ü"}', {"x": "ü"})
    assert ((place / "runs").names(), (place / "runs" / "ü").names()) == (["b", "ü"], ["a.json"])
    assert ((place / "runs").size(), (place / "runs").exists()) == (None, True)
    file.write_text("shorter")
    assert file.read_text() == "shorter"
    file.delete()
    assert (file.exists(), (place / "runs" / "b").exists()) == (False, True)


def test_a_folder_is_deleted_with_all_that_is_in_it_and_nothing_else(place: Storage) -> None:
    for name in ("run", "run-2", "other"):
        (place / name / "deep" / "file").write_text(name)
    (place / "run").delete()
    (place / "run").delete()  # what is not there need not be deleted
    assert place.names() == ["other", "run-2"]
    assert (place / "run-2" / "deep" / "file").read_text() == "run-2"


def test_files_of_this_machine_go_there_and_come_back_to_the_last_byte(place: Storage, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(21_000_001)  # S3 takes it in three parts
    (tmp_path / "sent").write_bytes(content)
    place.filesystem.create_dir((place / "deep").path)
    upload_file(tmp_path / "sent", place / "deep" / "file")
    assert (place / "deep" / "file").size() == 21_000_001
    fetch(place / "deep" / "file", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == content


def test_free_names_count_up(place: Storage) -> None:
    assert free_name(place, "run") == "run-1"
    for name in ("run-1", "run-3", "run-x", "running-2"):
        (place / name / "config.yaml").write_text("")
    assert free_name(place, "run") == "run-2"


def test_a_check_leaves_a_writable_folder_unchanged(place: Storage) -> None:
    (place / "before").write_text("")
    check_writable(place)
    assert place.names() == ["before"]


def test_s3_needs_no_environment_but_keys_if_the_address_says_the_rest(
    s3_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_storage(bucket) / "file").write_text("there")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_REGION")
    address = f"{bucket}?endpoint_override={s3_server.removeprefix('http://')}&scheme=http&region=us-east-1"
    assert (open_storage(address) / "file").read_text() == "there"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)  # S3's own comes before the general one
    assert (open_storage(bucket) / "file").read_text() == "there"


@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_folder_that_cannot_be_written_is_named(kind: str, tmp_path: Path) -> None:
    with s3.small_disk(tmp_path / "disk", "64k") as disk:
        if kind == "full":
            (disk / "much").write_bytes(b"x" * 64 * 1024)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StorageError) as refused:
            check_writable(Storage.local(disk))
        assert str(refused.value).startswith(f"storage {disk}: cannot write there: ")
        assert "\n" not in str(refused.value)
        assert list(disk.iterdir()) == ([disk / "much"] if kind == "full" else [])


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (("rlx-tests", "rlx-other"), "there is no such bucket"),
        (("rlx-tests/", "/"), "the address names no bucket"),
        (
            ("rlx-tests/", "rlx-tests/a?regoin=b&x="),
            "unknown option regoin, known are region, endpoint_override, scheme",
        ),
    ],
)
def test_a_malformed_s3_address_is_refused_with_the_reason(change: tuple[str, str], advice: str, bucket: str) -> None:
    address = bucket.replace(*change)
    with pytest.raises(StorageError) as refused:
        open_storage(address)
    assert str(refused.value).startswith(f"storage {address.partition('?')[0]}: {advice}")
    assert "\n" not in str(refused.value)


def test_a_server_that_refuses_the_key_is_reported(s3_faults: tuple[str, s3.Proxy]) -> None:
    address, proxy = s3_faults
    there = open_storage(address)
    (there / "file").write_text("")
    proxy.fail("403")
    with pytest.raises(StorageError, match=r"access denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_storage(address)
    with pytest.raises(StorageError, match=r"cannot write there: access denied: check AWS_ACCESS_KEY_ID"):
        check_writable(there)
    proxy.fail("403", methods=["PUT", "POST", "GET"])  # the answers to these have a body, which names the cause
    with pytest.raises(StorageError, match=r"the server does not know the key: check AWS_ACCESS_KEY_ID") as refused:
        check_writable(there)
    assert "\n" not in str(refused.value)
    assert s3.KEY not in str(refused.value) and s3.SECRET not in str(refused.value)


@pytest.mark.parametrize("kind", ["nobody listens", "hang"])
def test_a_server_that_does_not_answer_is_reported(
    kind: str, s3_faults: tuple[str, s3.Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, proxy = s3_faults
    monkeypatch.setattr(addresses, "_S3_ATTEMPTS", 1)
    monkeypatch.setattr(addresses, "_S3_REQUEST_TIMEOUT_S", 1.0)
    proxy.fail("hang")
    if kind != "hang":
        address = f"s3://{s3.BUCKET}/a?endpoint_override=http://127.0.0.1:{s3.free_port()}"
    started = time.monotonic()
    with pytest.raises(StorageError) as refused:
        open_storage(address)
    assert kind == "hang" or time.monotonic() - started < 2.0
    shown = address.partition("?")[0]
    assert str(refused.value).startswith(f"storage {shown}: the server does not answer: check AWS_ENDPOINT_URL (")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["500", "reset"])
def test_a_server_that_fails_for_a_while_is_tried_again(
    kind: s3.Kind, s3_faults: tuple[str, s3.Proxy], tmp_path: Path
) -> None:
    address, proxy = s3_faults
    there = open_storage(address)
    content = random.Random(1).randbytes(12_000_000)
    (tmp_path / "file").write_bytes(content)
    proxy.fail(kind, times=2, methods=["PUT"])  # for a reset, in the middle of a part
    upload_file(tmp_path / "file", there / "file")
    assert len(proxy.failed) == 2 and all("partNumber" in request for request in proxy.failed)
    proxy.fail(kind, times=1, methods=["GET"])
    fetch(there / "file", tmp_path / "back")
    assert len(proxy.failed) == 3
    assert (tmp_path / "back").read_bytes() == content


@pytest.mark.slow
def test_a_slow_server_is_waited_for(s3_faults: tuple[str, s3.Proxy]) -> None:
    address, proxy = s3_faults
    file = open_storage(address) / "file"
    file.write_text("late")
    proxy.fail("slow", methods=["GET"], seconds=1.5)
    assert file.read_text() == "late"
    assert len(proxy.failed) == 1  # not asked twice


@pytest.mark.slow
def test_a_storage_that_was_sent_to_a_worker_keeps_its_retries(s3_faults: tuple[str, s3.Proxy]) -> None:
    address, proxy = s3_faults
    sent = pickle.loads(pickle.dumps(open_storage(address)))
    (sent / "file").write_text("a")
    proxy.fail("500", times=2)
    assert (sent / "file").read_text() == "a"
    assert len(proxy.failed) == 2
    again = pickle.loads(pickle.dumps(sent))
    proxy.fail("500", times=2)
    assert (again / "file").read_text() == "a"
    assert len(proxy.failed) == 4


def test_the_waits_between_attempts_double() -> None:
    waits: list[float] = []
    failures = iter([OSError("down")] * 5)

    def action() -> str:
        for failure in failures:
            raise failure
        return "done"

    assert retry(action, "writing", wait=waits.append) == "done"
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_the_sixth_failure_is_raised_in_one_line() -> None:
    waits: list[float] = []
    tried: list[int] = []

    def action() -> None:
        tried.append(len(tried))
        raise OSError(f"attempt {len(tried)}:\n  NETWORK_CONNECTION")

    with pytest.raises(StorageError) as refused:
        retry(action, "writing step_000010", wait=waits.append)
    assert tried == [0, 1, 2, 3, 4, 5] and waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert str(refused.value) == (
        "writing step_000010 failed 6 times: the server does not answer: check AWS_ENDPOINT_URL "
        "(attempt 6: NETWORK_CONNECTION)"
    )


def test_other_errors_than_of_the_storage_are_not_retried() -> None:
    waits: list[float] = []
    with pytest.raises(ZeroDivisionError):
        retry(lambda: 1 // 0, "writing", wait=waits.append)
    assert waits == []
    assert retry(lambda: 7, "writing", wait=waits.append) == 7
    assert waits == []


@pytest.mark.parametrize("address", ["a\0b", "file:///a\0b", "a\udcff", "file:///" + "a" * 300, "/a" * 3000])
@pytest.mark.parametrize("function", [resolve_address, open_storage, local_folder])
def test_an_address_that_no_folder_can_have_is_refused(address: str, function: Callable[[str], object]) -> None:
    with pytest.raises(StorageError, match=r"^storage .*: (it |a path has|a file's name has)") as refused:
        function(address)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "form",
    [
        "s3://{key}:{secret}@bucket/x",
        "s3://{key}@bucket/x",
        "s3://bucket/x?access_key={key}&secret_key={secret}",
        "s3://bucket/x?region=a&secret_key={secret}",
        "s3://bucket/x?session_token={secret}",
        "hdfs://{key}:{secret}@host/x",
    ],
)
@pytest.mark.parametrize("function", [resolve_address, open_storage, local_folder])
def test_an_address_with_a_key_is_refused_and_the_key_is_not_repeated(
    form: str, function: Callable[[str], object]
) -> None:
    with pytest.raises(StorageError) as refused:
        function(form.format(key="AKIAKEY", secret="sekret"))
    assert "AKIAKEY" not in str(refused.value) and "sekret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "options", ["Access_Key={key}", "secret={secret}", "endpoint_override=http://{key}:{secret}@127.0.0.1:1"]
)
def test_a_key_in_an_option_that_has_another_name_is_not_repeated_either(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_S3_ATTEMPTS", 1)
    with pytest.raises(StorageError) as refused:
        open_storage("s3://bucket/x?" + options.format(key="AKIAKEY", secret="sekret"))
    assert "AKIAKEY" not in str(refused.value) and "sekret" not in str(refused.value)


@pytest.mark.parametrize("query", ["region=turkey-1", "endpoint_override=http://tokens.example:1", "region=secret"])
def test_a_value_that_sounds_like_a_key_is_accepted(query: str) -> None:
    address = f"s3://my-key-bucket/token?{query}"
    assert addresses.resolve_address(address) == address
    assert addresses.join_address(address, "runs", "a") == f"s3://my-key-bucket/token/runs/a?{query}"
    assert addresses._open_filesystem(address)[1] == "my-key-bucket/token"  # without asking a server


@pytest.mark.parametrize("option", ["key", "ACCESS_KEY", "my-secret", "token", "password", "%6Bey"])
def test_an_option_that_is_called_like_a_key_is_refused_even_if_empty(option: str) -> None:
    for value in ("", "AKIA"):
        with pytest.raises(StorageError, match="the address holds a key") as refused:
            addresses.resolve_address(f"s3://bucket/x?region=a&{option}={value}")
        assert "AKIA" not in str(refused.value)


def test_a_profile_with_a_key_is_refused_and_the_key_is_not_repeated(profiles: Path) -> None:
    (profiles / "mine.yaml").write_text("address: s3://AKIAKEY:sekret@bucket/x")
    with pytest.raises(StorageError, match="the address holds a key: put keys into the environment") as refused:
        resolve_address("mine")
    assert "AKIAKEY" not in str(refused.value) and "sekret" not in str(refused.value)


def test_keys_of_the_environment_are_in_no_pickle_and_no_text(s3_faults: tuple[str, s3.Proxy]) -> None:
    address, proxy = s3_faults
    there = open_storage(address)
    proxy.fail("403")
    with pytest.raises(StorageError) as refused:
        check_writable(there)
    told = (
        "".join(traceback.format_exception(refused.value))
        + repr(refused.value)
        + repr(there)
        + resolve_address(address)
    )
    assert s3.KEY not in told and s3.SECRET not in told
    sent = pickle.dumps(there)
    assert s3.KEY.encode() not in sent and s3.SECRET.encode() not in sent
    assert address.partition("=")[2].encode() in sent  # what is no secret is


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of profiles that is looked at first."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    monkeypatch.setattr(addresses, "PROFILES", (folder, addresses.PROFILES[1]))
    return folder


def test_local_is_a_folder_here(profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_address("local") == str(tmp_path / "storage")
    assert open_storage("local").path == str(tmp_path / "storage")
    assert local_folder("local") == tmp_path / "storage"


def test_nfs_is_refused_while_nothing_is_mounted(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_NFS", str(tmp_path))
    with pytest.raises(StorageError, match=rf"^storage profile .*/nfs\.yaml: nothing is mounted at {tmp_path}$"):
        resolve_address("nfs")
    assert list(tmp_path.iterdir()) == [profiles]
    monkeypatch.setenv("RLX_NFS", "/proc")  # something that is mounted everywhere
    assert resolve_address("nfs") == "/proc/rlx"
    monkeypatch.delenv("RLX_NFS")
    with pytest.raises(StorageError, match=r"nothing is mounted at /mnt/nfs$"):
        resolve_address("nfs")


def test_s3_asks_for_its_bucket(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_BUCKET", raising=False)
    with pytest.raises(StorageError, match=r"^storage profile .*/s3\.yaml: set RLX_BUCKET in the environment$"):
        resolve_address("s3")
    monkeypatch.setenv("RLX_BUCKET", "mine")
    assert resolve_address("s3") == "s3://mine/rlx"


def test_a_profile_says_where_its_server_is(s3_server: str, bucket: str, profiles: Path) -> None:
    (profiles / "mine.yaml").write_text(f"address: {bucket}\nregion: eu-central-1\nendpoint: {s3_server}\n")
    there = resolve_address("mine")
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(there).query)
    assert query == {"region": ["eu-central-1"], "endpoint_override": [s3_server]}
    (open_storage("mine") / "file").write_text("a")
    assert (open_storage(bucket) / "file").read_text() == "a"


def test_a_profile_of_the_working_folder_goes_before_one_that_ships(profiles: Path, tmp_path: Path) -> None:
    (profiles / "local.yaml").write_text(f"address: {tmp_path}/elsewhere\n")
    assert resolve_address("local") == f"{tmp_path}/elsewhere"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "/data/default-1/x"), ("", "/data/default-1/x"), ("mine", "/data/mine/x")]
)
def test_a_default_replaces_a_missing_variable(
    value: str | None, expected: str, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLX_TEST_NAME", raising=False)
    if value is not None:
        monkeypatch.setenv("RLX_TEST_NAME", value)
    (profiles / "mine.yaml").write_text("address: /data/${RLX_TEST_NAME:-default-1}/x\n")
    assert resolve_address("mine") == expected


def test_the_default_storage_is_a_folder_whatever_profiles_there_are(profiles: Path) -> None:
    (profiles / "storage.yaml").write_text("address: s3://another\n")
    assert resolve_address("storage") == str(Path("storage").resolve())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("address: a\nadress: b\n", "unknown key adress"),
        ("address: s3://a-${HF_TOKEN}\n", "${HF_TOKEN} is called as a secret is: an address shows it to everybody"),
        ("region: a\n", "it has no address"),
        ("address: [a\n", "not valid YAML: line 2, column 1: "),
        ("", ""),
        ("5\n", ""),
        ("- address\n", ""),
        ("- address: a\n", ""),
        ("address: \xff\n", ""),  # written as Latin-1, which is no UTF-8
        ("address: a\n1: b\n", "unknown key 1"),
        ("address:\n", "it has no address"),
    ],
)
def test_a_malformed_profile_is_refused_in_one_line_that_names_it(content: str, fault: str, profiles: Path) -> None:
    (profiles / "mine.yaml").write_text(content, encoding="latin-1")
    with pytest.raises(StorageError) as refused:
        resolve_address("mine")
    assert str(refused.value).startswith(f"storage profile {profiles}/mine.yaml: {fault}")
    assert "\n" not in str(refused.value)


def test_profiles_that_ship_are_package_data() -> None:
    folder = addresses.PROFILES[-1]
    assert folder == Path(addresses.__file__).parent / "profiles"
    assert sorted(file.name for file in folder.glob("*.yaml")) == ["local.yaml", "nfs.yaml", "s3.yaml"]


def test_listing_checkpoints_needs_no_torch() -> None:
    code = "import sys, rlx.storage.addresses, rlx.storage.checkpoint_catalog; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_near_miss_of_a_profile_is_asked_about(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=r"^storage locl: no such profile or folder; did you mean local\?$"):
        resolve_address("locl")
    assert list(tmp_path.iterdir()) == [profiles]
    (tmp_path / "locl").mkdir()
    assert resolve_address("locl") == str(tmp_path / "locl")
    assert resolve_address("quite-another") == str(tmp_path / "quite-another")
