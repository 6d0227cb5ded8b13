"""S3 on this machine: a real moto server, and a proxy before it that fails as networks and servers do; a small disk."""

from __future__ import annotations

import http.client
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
import requests

BUCKET = "rlx-tests"
KEY, SECRET = "AKIAIOSFODNN7RLXTEST", "wJalrXUtnFEMI/K7MDENG/rlx+test"
READS, WRITES = ("GET", "HEAD"), ("PUT", "POST")
Kind = Literal["500", "403", "slow", "reset", "hang"]

_CODES = {"500": "InternalError", "403": "InvalidAccessKeyId"}
_CLIENT_S = 60  # longest wait for moto


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(endpoint: str) -> dict[str, str]:
    """What a client of this server needs in its environment."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",  # no one asks a cloud for a role
    }


@contextmanager
def moto(log: Path | None = None) -> Iterator[str]:
    """A moto server with one bucket; gives its address."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    out = log.open("w") if log else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _await(address, process)
        requests.put(f"{address}/{BUCKET}", timeout=_CLIENT_S).raise_for_status()
        yield address
    finally:
        process.kill()
        process.wait()


def _await(address: str, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + _CLIENT_S
    while True:
        try:
            requests.get(address, timeout=_CLIENT_S)
            return
        except requests.ConnectionError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own that is soon full; the test is skipped where none can be mounted."""
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False)
        failed = mounted.returncode != 0
    except FileNotFoundError:
        failed = True
    if failed:
        pytest.skip("a file system can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Proxy:
    """Passes requests on to a server, or fails as it has been told to."""

    def __init__(self, server: str) -> None:
        upstream = urllib.parse.urlsplit(server)
        assert upstream.hostname and upstream.port
        self.upstream = (upstream.hostname, upstream.port)
        self.asked: list[str] = []  # method and path of each request, in order
        self.failed: list[str] = []  # those that were made to fail
        self._kind: Kind | None = None
        self._methods: frozenset[str] = frozenset()
        self._left: int | None = None
        self._seconds = 0.0
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        self._server.block_on_close = False  # a client's kept-alive connection is no reason to wait
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def fail(
        self, kind: Kind, *, times: int | None = None, methods: Sequence[str] = READS + WRITES, seconds: float = 0.0
    ) -> None:
        """From now on requests of these methods fail in this way: so many, or (None) all until `heal`.

        Args:
            seconds: how long a "slow" one takes before it passes.
        """
        with self._lock:
            self._kind, self._methods, self._left, self._seconds = kind, frozenset(methods), times, seconds
            self._healed = threading.Event()

    def heal(self) -> None:
        """Everything passes from now on; who hangs is let go."""
        with self._lock:
            self._kind = None
            self._healed.set()

    def close(self) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()

    def decided(self, method: str, path: str) -> tuple[Kind | None, float, threading.Event]:
        """What becomes of a request, how long that takes, and what ends a hang."""
        with self._lock:
            self.asked.append(f"{method} {path}")
            kind = self._kind if method in self._methods and self._left != 0 else None
            if kind:
                self.failed.append(f"{method} {path}")
                self._left = None if self._left is None else self._left - 1
            return kind, self._seconds, self._healed


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def _handle(self) -> None:
        kind, seconds, healed = self.proxy.decided(self.command, self.path)
        if kind == "reset":
            return self._reset()
        if kind == "hang":
            healed.wait(_CLIENT_S)
            return self._reset()
        body = self._body()
        if kind in ("500", "403"):
            return self._refuse(kind)
        if kind == "slow":
            time.sleep(seconds)
        self._pass(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _reset(self) -> None:
        """Half of what is being uploaded is read, then the peer sees a reset, not an orderly end."""
        length = int(self.headers.get("Content-Length", 0))
        if length > 1:
            self.rfile.read(length // 2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _refuse(self, kind: str) -> None:
        code = _CODES[kind]
        text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
        self.send_response(int(kind))
        self._answer(text.encode(), "application/xml")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        raw = b""
        while size := int((line := self.rfile.readline()).split(b";")[0], 16):
            raw += line + self.rfile.read(size + 2)
        raw += line
        while (line := self.rfile.readline()) not in (b"\r\n", b""):  # trailers
            raw += line
        return raw + line

    def _pass(self, body: bytes) -> None:
        upstream = http.client.HTTPConnection(*self.proxy.upstream, timeout=_CLIENT_S)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "connection", "date", "server", "content-type"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self._answer(content, answer.getheader("Content-Type"), length)
        finally:
            upstream.close()

    def _answer(self, content: bytes, kind: str | None, length: str | None = None) -> None:
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone, or was sent away
            super().handle()

    def finish(self) -> None:
        with suppress(OSError, ValueError):  # of a connection that was reset
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass
