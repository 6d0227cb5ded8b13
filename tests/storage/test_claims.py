"""Claims: one process at a time, on a folder and on S3; what is left of one that is gone is taken over."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlx.storage import claims
from rlx.storage.addresses import open_storage
from rlx.storage.claims import ClaimedError, Owner
from rlx.storage.filesystem import Storage, StorageError

CONTENDER = """
import sys
from rlx.storage import claims
from rlx.storage.addresses import open_storage

for line in sys.stdin:
    name = line.strip()
    try:
        claim = claims.take_new(open_storage(sys.argv[1]), name if name != "-" else None, "run", "ppo")
        print("won", claim.folder.name, flush=True)
    except claims.ClaimedError as error:
        print("lost", error, flush=True)
"""


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "there") if request.param == "folder" else str(request.getfixturevalue("bucket"))


@pytest.fixture
def contenders(place: str) -> Iterator[list[Any]]:
    """Two processes that claim what they are told to, and keep it."""
    command = [sys.executable, "-c", CONTENDER, place]
    pair = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    yield pair
    for process in pair:
        process.kill()
        process.communicate()


def ask(contenders: list[Any], name: str) -> list[str]:
    """Lets both claim a name at the same time; gives their answers, sorted."""
    for process in contenders:
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
    return sorted(process.stdout.readline().strip() for process in contenders)


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_one_of_two_gets_a_name(contenders: list[Any], times: int) -> None:
    for i in range(times):
        lost, won = ask(contenders, f"run-{i}")
        assert won == f"won run-{i}"
        assert lost.startswith(f"lost run 'run-{i}' is ")


@pytest.mark.slow
def test_two_get_two_names(contenders: list[Any]) -> None:
    answers = [answer for _ in range(3) for answer in ask(contenders, "-")]
    assert all(answer.startswith("won ppo-") for answer in answers) and len(set(answers)) == 6


def test_what_is_claimed_says_by_whom_until_it_is_released(place: str) -> None:
    folder = open_storage(place) / "run"
    with claims.take(folder, "run 'run'"), pytest.raises(ClaimedError) as held:
        claims.take(folder, "run 'run'")
    assert f"run 'run' is in use by process {os.getpid()} of " in str(held.value)
    assert not folder.names()
    with claims.take(folder, "run 'run'"):
        pass


def test_a_folder_that_stays_empty_goes_and_a_used_one_stays(tmp_path: Path) -> None:
    for name, content in (("unused", None), ("used", "x")):
        with claims.take(Storage.local(tmp_path / name), name) as claim:
            if content:
                (claim.folder / "run.json").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["run.json"]


@pytest.mark.slow
def test_a_killed_process_is_followed_at_once(place: str, contenders: list[Any]) -> None:
    first, second = contenders
    assert ask([first], "run") == ["won run"]
    assert ask([second], "run")[0].startswith(f"lost run 'run' is in use by process {first.pid} of ")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert ask([second], "run") == ["won run"]
    with pytest.raises(ClaimedError, match=f"process {second.pid} "):
        claims.take(open_storage(place) / "run", "it")


def foreign(folder: Path, unseen_s: float, content: str | None = None) -> Path:
    """A claim that a process of another machine has left or holds."""
    folder.mkdir(exist_ok=True)
    file = folder / "owner-3.json"
    far = json.dumps(asdict(replace(Owner.myself(), machine="another", host="far")))
    file.write_text(far if content is None else content)
    os.utime(file, (time.time() - unseen_s,) * 2)
    return file


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"pid": "x"}'])
def test_another_machine_counts_as_gone_after_a_minute(tmp_path: Path, content: str | None) -> None:
    folder = Storage.local(tmp_path / "run")
    foreign(tmp_path / "run", 50, content)
    with pytest.raises(ClaimedError, match="on far" if content is None else "a process that starts it"):
        claims.take(folder, "it")
    foreign(tmp_path / "run", 70, content)
    with claims.take(folder, "it"):
        assert "owner-4.json" in folder.names()
    assert not folder.exists()


@pytest.mark.parametrize(
    "changes", [{"since": "x"}, {"since": None}, {"pid": [1]}, {"pid": -1}, {"user": {}}, {"more": 1}, {"pid": True}]
)
def test_a_claim_with_other_values_is_no_owner_and_no_crash(tmp_path: Path, changes: dict[str, Any]) -> None:
    foreign(tmp_path / "run", 0, json.dumps(asdict(Owner.myself()) | {"machine": "another"} | changes))
    with pytest.raises(ClaimedError, match=r"in use by (a process that starts it|process \d+ of)"):
        claims.take(Storage.local(tmp_path / "run"), "it")


def test_who_holds_a_claim_is_told_in_one_line(tmp_path: Path) -> None:
    odd = replace(Owner.myself(), user="a\nb", host="c\nd", machine="another", pid=10**30)
    foreign(tmp_path / "run", 0, json.dumps(asdict(odd)))
    with pytest.raises(ClaimedError, match=r"of a b on c d for \d+ s") as held:
        claims.take(Storage.local(tmp_path / "run"), "it")
    assert "\n" not in str(held.value)
    foreign(tmp_path / "here", 0, json.dumps(asdict(replace(Owner.myself(), pid=10**30))))
    with claims.take(Storage.local(tmp_path / "here"), "it"):  # no process has such a number
        pass


def test_a_claim_of_any_number_has_a_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    foreign(folder, 100).rename(folder / "owner-999999999.json")
    with claims.take(Storage.local(folder), "it"), pytest.raises(ClaimedError, match=r"in use by process"):
        claims.take(Storage.local(folder), "it")
    assert not folder.exists()


def test_a_process_with_the_same_number_is_another_one(tmp_path: Path) -> None:
    foreign(tmp_path, 0, json.dumps(asdict(replace(Owner.myself(), started="1"))))
    with claims.take(Storage.local(tmp_path), "it") as claim:
        assert claim.folder.names() == ["owner-3.json", "owner-4.json"]


@pytest.mark.parametrize(("exists", "age_s", "is_free"), [(True, 50, False), (True, 70, True), (False, 0, True)])
def test_a_process_that_cannot_be_looked_at_counts_by_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, age_s: float, is_free: bool
) -> None:
    mine = Owner.myself()
    pid = os.getpid() if exists else 2**22 + 1  # above the largest number of a process
    foreign(tmp_path / "run", age_s, json.dumps(asdict(replace(mine, pid=pid, started=""))))
    monkeypatch.setattr(claims, "_started", lambda pid: "")
    if not is_free:
        with pytest.raises(ClaimedError, match=f"process {pid} of "):
            claims.take(Storage.local(tmp_path / "run"), "it")
        return
    with claims.take(Storage.local(tmp_path / "run"), "it") as claim:
        assert "owner-4.json" in claim.folder.names()


def test_an_older_claim_of_a_live_process_counts_too(tmp_path: Path) -> None:
    foreign(tmp_path, 70)
    (tmp_path / "owner-12.json").write_text(json.dumps(asdict(replace(Owner.myself(), started="1"))))
    (tmp_path / "owner-4.json").write_text(json.dumps(asdict(Owner.myself())))
    with pytest.raises(ClaimedError, match=f"process {os.getpid()} of "):
        claims.take(Storage.local(tmp_path), "it")


def test_where_ctrl_c_is_ignored_a_taken_claim_ends_the_process_as_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_BEAT_S", 0.05)
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with claims.take(Storage.local(tmp_path / "run"), "run 'run'"):
            foreign(tmp_path / "run", 0)
            end = time.monotonic() + 10
            while not came and time.monotonic() < end:
                time.sleep(0.05)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)
    assert came == [signal.SIGTERM]


@pytest.fixture
def plain_interrupts() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt, whatever tests of other libraries have left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_renewed_and_notices_when_it_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_interrupts: None
) -> None:
    monkeypatch.setattr(claims, "_BEAT_S", 0.05)
    with pytest.raises(KeyboardInterrupt), claims.take(Storage.local(tmp_path / "run"), "run 'run'"):
        file = tmp_path / "run" / "owner-1.json"
        os.utime(file, (0, 0))
        time.sleep(0.5)
        assert time.time() - file.stat().st_mtime < 10
        foreign(tmp_path / "run", 0)
        time.sleep(10)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["owner-3.json"]


def test_a_storage_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"it cannot be claimed in .*/file/run: "):
        claims.take(Storage.local(tmp_path / "file" / "run"), "it")
