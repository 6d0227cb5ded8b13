"""What tracking services' addresses and keys are refused before a run starts."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
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


@pytest.mark.parametrize(("status", "body"), [(404, "<html>"), (200, "hello"), (501, ""), (200, "[]")])
def test_a_web_server_that_is_no_mlflow_is_refused(status: int, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server(status, body) as address:
        with pytest.raises(ConfigError, match=rf"^tracking\.uri {address}: a web server .* \(status {status}\)$"):
            reachable.check_mlflow(f"{address}/")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")  # a proxy may show its page to those who are not signed in
        reachable.check_mlflow(address)


@pytest.mark.parametrize(("status", "body"), [(200, '{"experiment": {}}'), (404, UNKNOWN), (401, "<html>"), (503, "")])
def test_mlflow_and_what_may_be_it_pass(status: int, body: str) -> None:
    """Who asks for a password or is overloaded may be MLflow; it is asked again once Ray is there."""
    with web_server(status, body) as address:
        reachable.check_mlflow(address)


def test_wandb_needs_a_key_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    tracking = from_tree({"tracking": {"backends": ["mlflow", "wandb"]}}).tracking
    with pytest.raises(ConfigError, match=r"^tracking\.backends wandb: no key for W&B: `wandb login` asks for it"):
        reachable.check_tracking(tracking)
    monkeypatch.setenv("WANDB_MODE", "offline")
    reachable.check_tracking(tracking)


def test_a_tracking_address_of_no_kind_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^tracking\.uri postgres://db: MLflow knows no postgres; nearest: postgresql$"
    ):
        reachable.check_mlflow("postgres://db")
    with pytest.raises(ConfigError, match=r"^tracking\.uri nonsense: no address, as http://HOST:5000 or sqlite:"):
        reachable.check_mlflow("nonsense")
    for uri in (None, "sqlite:///x.db", "postgresql+psycopg2://u@h/db", "databricks", str(Path(__file__).parent)):
        reachable.check_mlflow(uri)
