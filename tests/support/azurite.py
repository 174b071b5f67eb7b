"""Azurite, Microsoft's emulator of Azure Blob Storage, behind a proxy that fails on request.

Both listen on free ports of the loopback. Azurite is no Python package: ``npm install azurite``,
with ``azurite-blob`` on the ``PATH``.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import itertools
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROGRAM = "azurite-blob"
_ACCOUNT = "devstoreaccount1"
# The one key of every Azurite, which its documentation has.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_CHUNKED = "transfer-encoding"
_OPTIONS = ("--blobPort", "0", "--inMemoryPersistence", "--silent", "--skipApiVersionCheck")
# Its standard input ends with the parent process, however that ends.
_UNTIL_INPUT_ENDS = '"$@" & server=$!; cat > /dev/null; kill $server; wait $server'


def is_installed() -> bool:
    """Return whether there is an emulator to start."""
    return shutil.which(PROGRAM) is not None


class Azurite:
    """A running emulator, with its data in memory.

    Attributes:
        failed: The methods of the requests that have failed.
    """

    def __init__(self) -> None:
        words = ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", PROGRAM, *_OPTIONS, "--disableTelemetry"]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        listens = next(line for line in self._process.stdout if "successfully listens on" in line)
        self.failed: list[str] = []
        self._fault, self._every = "", 0
        self._numbers = itertools.count(1)
        proxy = partial(_Proxy, self, listens.split()[-1].removeprefix("http://"))
        self._server = _Server(("127.0.0.1", 0), proxy)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/{_ACCOUNT}"

    @contextlib.contextmanager
    def failing(self, fault: str, every: int) -> Iterator[None]:
        """Let requests fail during the block.

        Args:
            fault: ``"503"``: that status instead of the effect. ``"lost"``: the effect, no reply.
            every: One request in so many fails.
        """
        self._fault, self._every = fault, every
        self.failed.clear()
        try:
            yield
        finally:
            self._every = 0

    def due(self, method: str) -> str:
        """Return the fault of the next request; empty: none."""
        if not self._every or next(self._numbers) % self._every:
            return ""
        self.failed.append(method)
        return self._fault

    def environment(self) -> dict[str, str]:
        """Return the environment that makes ``az://`` refer to this emulator."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        }

    def make_container(self, name: str) -> None:
        """Make a container, which no address does."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        signed = "\n".join(
            [
                "PUT",
                *[""] * 11,
                *(f"{header}:{text}" for header, text in headers.items()),
                f"/{_ACCOUNT}/{_ACCOUNT}/{name}",
                "restype:container",
            ]
        )
        digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
        request = urllib.request.Request(
            f"{self.endpoint}/{name}?restype=container", method="PUT", headers=headers
        )
        urllib.request.urlopen(request, timeout=240).close()

    def close(self) -> None:
        """End the emulator."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=240)
        self._process.stdout.close()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that are cut off, or that give up, are a part of the tests."""


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the emulator at ``target``."""

    protocol_version = "HTTP/1.1"  # connections are kept

    def __init__(self, azurite: Azurite, target: str, *words: Any) -> None:
        self._azurite, self._target = azurite, target
        super().__init__(*words)

    def log_message(self, *words: Any) -> None: ...

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self._azurite.due(self.command)
        if fault == "503":
            self._reply(503, {}, b"", "0")
            return
        connection = http.client.HTTPConnection(self._target)
        connection.request(self.command, self.path, body, dict(self.headers))
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        if fault == "lost":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        length = reply.getheader("Content-Length") if self.command == "HEAD" else None
        self._reply(reply.status, dict(reply.getheaders()), content, length or str(len(content)))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _reply(self, status: int, headers: dict[str, str], content: bytes, length: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "content-length", "keep-alive", _CHUNKED):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content)
