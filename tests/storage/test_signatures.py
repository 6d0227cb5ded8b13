"""Signatures: what a user has signed is known again, and nothing else is."""

import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlx.storage import signatures
from rlx.storage.filesystem import Storage
from rlx.storage.signatures import Signer

CONTENT = {"b": [1, 2.5, None], "a": {"x": "ü"}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield tmp_path / "config"


def test_what_was_signed_is_known_again_and_nothing_else(home: Path) -> None:
    signature = Signer.new().sign(CONTENT)
    read = json.loads(json.dumps({"a": CONTENT["a"], "b": CONTENT["b"]}))
    assert signatures.is_own(read, signature)
    assert not signatures.is_own(read | {"c": 1}, signature)
    nonce, _, digest = signature.partition(":")
    for forged in ("", ":", "ü", nonce, f"{nonce}:", f":{digest}", f"{nonce}0:{digest}", signature.upper()):
        assert not signatures.is_own(read, forged), forged


def test_another_user_has_another_key(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    signature = Signer.new().sign(CONTENT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert not signatures.is_own(CONTENT, signature)
    assert (home / "rlx" / "key").read_bytes() != (tmp_path / "other" / "rlx" / "key").read_bytes()


def test_the_key_is_made_once_and_for_its_user_alone(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        signed = list(pool.map(lambda _: Signer.new().sign(CONTENT), range(32)))
    assert all(signatures.is_own(CONTENT, signature) for signature in signed)
    key = home / "rlx" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    assert [file.name for file in key.parent.iterdir()] == ["key"]
    assert key.read_bytes() not in repr(Signer.new()).encode() and Signer.new().key != key.read_bytes()


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_key_that_anyone_could_guess_signs_nothing_for_later(home: Path, content: bytes) -> None:
    (home / "rlx").mkdir(parents=True)
    (home / "rlx" / "key").write_bytes(content)
    signature = Signer.new().sign(CONTENT)
    assert signatures.is_own(CONTENT, signature)  # in this process
    (home / "rlx" / "key").write_bytes(bytes(32))
    assert not signatures.is_own(CONTENT, signature)


def test_without_a_place_for_a_key_nothing_is_known_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert signatures.is_own(CONTENT, Signer.new().sign(CONTENT))


def test_a_folder_is_known_by_its_file(home: Path, tmp_path: Path) -> None:
    folder = Storage.local(tmp_path)
    assert not signatures.is_own_folder(folder, CONTENT)
    (folder / signatures.SIGNATURE).write_text(Signer.new().sign(CONTENT))
    assert signatures.is_own_folder(folder, CONTENT)
    (tmp_path / signatures.SIGNATURE).write_bytes(b"\xff\xfe")
    assert not signatures.is_own_folder(folder, CONTENT)
