"""What tracking services' addresses and keys are refused before a run starts."""

import http.server
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.sections.records import TrackingConfig
from rlx.tracking.services import reachable

UNKNOWN = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"})


@contextmanager
def web_server(status: int, body: str) -> Iterator[str]:
    """A server on loopback that answers everything alike; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_is_down_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^tracking\.uri http://127\.0\.0\.1:9: no server answers there \(.*refused"):
        reachable.check_mlflow("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("status", "body"), [(404, "<html>"), (200, "hello"), (501, ""), (200, "[]"), (200, "[" * 200_000)]
)
def test_a_web_server_that_is_no_mlflow_is_refused(status: int, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server(status, body) as address:
        with pytest.raises(ConfigError, match=rf"^tracking\.uri {address}: a web server .* \(status {status}\)$"):
            reachable.check_mlflow(address)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")  # a proxy may show its page to those who are not signed in
        reachable.check_mlflow(address)


@pytest.mark.parametrize(("status", "body"), [(200, '{"experiment": {}}'), (404, UNKNOWN), (401, "<html>"), (503, "")])
def test_mlflow_and_what_may_be_it_pass(status: int, body: str) -> None:
    """Who asks for a password or is overloaded may be MLflow; it is asked again once Ray is there."""
    with web_server(status, body) as address:
        reachable.check_mlflow(address)


@pytest.mark.parametrize("address", ["http://localhost:PORT", "http://my host:5000", "http://127.0.0.1:99999"])
def test_an_address_that_is_malformed_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tracking\.uri {address}: no server answers there \("):
        reachable.check_mlflow(address)


def test_a_port_that_is_too_large_is_not_another_one() -> None:
    """The system would take the rest by 65536, where somebody may answer."""
    with web_server(200, '{"experiment": {}}') as address:
        place, _, port = address.rpartition(":")
        with pytest.raises(ConfigError, match=r"no server answers there \(Port out of range"):
            reachable.check_mlflow(f"{place}:{int(port) + 65_536}")


@contextmanager
def speaker(says: Iterable[bytes], every_s: float = 0.0) -> Iterator[str]:
    """What takes one connection and says something to it; yields its web address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            with suppress(OSError), server.accept()[0] as connection:
                for each in says:
                    connection.sendall(each)
                    time.sleep(every_s)

        threading.Thread(target=speak, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"])
def test_what_is_no_web_server_is_refused(says: bytes) -> None:
    with speaker([says]) as address, pytest.raises(ConfigError, match=r": something answers there that is no web serv"):
        reachable.check_mlflow(address)


@pytest.mark.slow
def test_a_server_that_says_little_by_little_is_not_waited_for() -> None:
    """Each byte is in time; MLflow itself is asked later."""
    started = time.monotonic()
    with speaker((bytes([byte]) for byte in b"HTTP/1.1 200 OK" * 100), every_s=0.1) as address:
        reachable.check_mlflow(address)
    assert time.monotonic() - started < 30  # without a limit in all: 150 s


def test_a_certificate_that_mlflow_may_be_told_to_take_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_TRACKING_SERVER_CERT_PATH and others are MLflow's to read."""
    refused = urllib.error.URLError(ssl.SSLCertVerificationError("self-signed certificate"))
    monkeypatch.setattr(reachable, "_read", lambda url: (_ for _ in ()).throw(refused))
    reachable.check_mlflow("https://mlflow.example")


@pytest.mark.slow
def test_wandb_needs_a_key_before_anything_starts(tmp_path: Path) -> None:
    """In a process of its own: W&B keeps what it has found for all later runs of a process."""
    code = (
        "from rlx.config.loading import from_tree\nfrom rlx.tracking.services import reachable\n"
        "reachable.check_tracking(from_tree({'tracking': {'backends': ['mlflow', 'wandb']}}).tracking, 'storage')\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path)}
    without, offline = (
        subprocess.run([sys.executable, "-c", code], env=kept | more, capture_output=True, text=True, check=False)
        for more in ({}, {"WANDB_MODE": "offline"})
    )
    assert "ConfigError: tracking.backends wandb: no key for W&B: `wandb login` asks for it" in without.stderr
    assert offline.returncode == 0, offline.stderr


@contextmanager
def without_roots_rights() -> Iterator[None]:
    """As a user who may not write everywhere, if the tests run as root."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def refusal(uri: Path | None, storage: Path) -> str:
    """Why MLflow's database at a path, or in a storage, is refused; empty if it is not."""
    tracking = TrackingConfig(uri=uri and f"sqlite:///{uri}")
    try:
        reachable.check_tracking(tracking, str(storage))
    except ConfigError as error:
        return str(error).removeprefix(f"{'tracking.uri' if uri else 'storage'}: MLflow cannot write its database ")
    return ""


def test_a_database_that_cannot_be_written_is_refused_before_mlflow_tries(tmp_path: Path) -> None:
    """MLflow would try for 100 s."""
    (file := tmp_path / "file").touch()
    (folder := tmp_path / "folder").mkdir()
    for uri, cause in [
        (file / "x.db", f"{file} is no folder"),
        (file / "new" / "x.db", f"{file} is no folder"),
        (folder, "this is no file"),
    ]:
        assert refusal(uri, tmp_path) == f"{uri}: {cause}"
    assert not refusal(file, tmp_path) and not refusal(tmp_path / "new" / "x.db", tmp_path)
    assert not refusal(None, tmp_path / "new")
    assert refusal(None, file) == f"{file / 'mlflow.db'}: {file} is no folder"


def test_a_database_without_write_access_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        (folder := Path(name)).chmod(0o755)
        (file := folder / "mlflow.db").touch()
        file.chmod(0o444)
        with without_roots_rights():
            if os.access(folder, os.W_OK):  # its own user's
                assert refusal(file, folder) == f"{file}: no write access to this file"
                return
            assert refusal(None, folder) == f"{file}: no write access to the folder {folder}"
            assert refusal(folder / "new" / "x.db", folder).endswith(f"no write access to the folder {folder}")
        folder.chmod(0o777)
        with without_roots_rights():
            assert refusal(file, folder) == f"{file}: no write access to this file"


def test_a_tracking_address_of_no_kind_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^tracking\.uri postgres://db: MLflow knows no postgres; nearest: postgresql$"
    ):
        reachable.check_mlflow("postgres://db")
    with pytest.raises(ConfigError, match=r"^tracking\.uri nonsense: no address, as http://HOST:5000 or sqlite:"):
        reachable.check_mlflow("nonsense")
    for uri in (None, "sqlite:///x.db", "postgresql+psycopg2://u@h/db", "databricks", str(Path(__file__).parent)):
        reachable.check_mlflow(uri)
