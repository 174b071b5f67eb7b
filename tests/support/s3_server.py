"""A local S3 server that fails on request: moto behind a layer that injects faults.

``python tests/support/s3_server.py`` prints its port. It is a separate process, so that its
warnings and its load do not affect the tests. It ends when its standard input is closed, however
the parent process ends. Faults and the log of requests are accessed at ``/_faults``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

CONTROL = "/_faults"
FOREVER = 1 << 30

# What a fault does. A number: that status instead of the request's effect. "after NUMBER": the
# effect, then that status. "lost": the effect, and no reply. "dropped": neither. "truncated": the
# first half of the reply. "hang": nothing until other faults are set, then dropped. "late": the
# effect after `seconds`, for benchmarks. "stale": a listing without the keys that match `hidden`.
# "unconditional": the request without its conditions. "flipped": the reply's last byte is not the
# stored one. "ignored": said to be done, and not done.
KINDS = (
    "500",
    "501",
    "503",
    "429",
    "after 500",
    "lost",
    "dropped",
    "truncated",
    "hang",
    "late",
    "stale",
    "unconditional",
    "flipped",
    "ignored",
)


@dataclass
class Fault:
    """Requests that fail.

    Args:
        method: The method of the requests.
        key: A pattern that their path matches.
        kind: The kind of failure.
        times: The number of failures.
        skip: The number of requests that succeed before.
    """

    kind: str
    key: str = ""
    method: str = "PUT"
    times: int = 1
    skip: int = 0
    hidden: str = ""
    seconds: float = 0.0  # of a "late" fault
    every: int = 1  # of the requests that match, one in so many


class S3:
    """A client for the control of the server."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def environment(self) -> dict[str, str]:
        """Return the environment that makes ``s3://`` refer to this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(
            urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=240
        ).close()

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Inject faults during the block."""
        self._control([asdict(fault) for fault in faults])
        try:
            yield
        finally:
            self._control([])

    def seen(self) -> list[tuple[str, str, str]]:
        """Return the requests since faults were set: method, path and ``"ok"`` or the fault."""
        with urllib.request.urlopen(self.endpoint + CONTROL, timeout=240) as reply:
            return [tuple(entry) for entry in json.load(reply)]

    def _control(self, faults: list[dict[str, Any]]) -> None:
        request = urllib.request.Request(
            self.endpoint + CONTROL, json.dumps(faults).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=240).close()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=240)


class _Faulty:
    """A WSGI application with faults before and after another one."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._faults: list[Fault] = []
        self._lifted = threading.Event()  # the faults of this moment
        self._seen: list[tuple[str, str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == CONTROL:
            return self._control(environ, start_response)
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method == "GET" and "list-type" in environ.get("QUERY_STRING", ""):
            method = "LIST"
        lifted = self._lifted
        fault = self._due(method, path)
        if fault is None:
            return self._pass(environ, start_response)
        if fault.kind == "late":
            time.sleep(fault.seconds)
            return self._pass(environ, start_response)
        if fault.kind == "unconditional":
            for name in ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"):
                environ.pop(name, None)
            return self._pass(environ, start_response)
        if fault.kind.isdigit():
            with contextlib.suppress(ValueError, OSError):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _error(start_response, fault.kind)
        if fault.kind == "ignored":
            start_response("204 No Content", [("Content-Length", "0")])
            return [b""]
        if fault.kind == "hang":
            lifted.wait()
        if fault.kind in ("hang", "dropped"):
            return _drop(environ)
        status, headers, body = self._answer(environ)
        if fault.kind == "lost":
            return _drop(environ)
        if fault.kind.startswith("after"):
            return _error(start_response, fault.kind.removeprefix("after "))
        if fault.kind == "stale":
            body = re.sub(
                rb"<Contents>.*?</Contents>",
                lambda m: _without(m.group(), fault.hidden),
                body,
                flags=re.DOTALL,
            )
        if fault.kind == "flipped" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        write = start_response(status, [*headers, ("Content-Length", str(len(body)))])
        if fault.kind == "truncated":
            write(body[: len(body) // 2])
            return _drop(environ)
        return [body]

    def _pass(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            return self._app(environ, start_response)
        status, headers, body = self._answer(environ)
        start_response(status, headers)
        return [body]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        kept: list[Any] = []
        # One write at a time: moto looks at the condition of a write before it writes, and S3 does
        # both at once.
        is_write = environ["REQUEST_METHOD"] != "GET"
        with self._writing if is_write else contextlib.nullcontext():
            found = self._app(
                environ, lambda status, headers, info=None: kept.extend((status, headers))
            )
            body = b"".join(found)
        return kept[0], kept[1], body

    def _due(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.method in (method, "ANY") and re.search(fault.key, path):
                    if fault.skip > 0:
                        fault.skip -= 1
                    elif fault.times > 0:
                        fault.times -= 1
                        fault.skip = fault.every - 1
                        self._seen.append((method, path, fault.kind))
                        return fault
            self._seen.append((method, path, "ok"))
            return None

    def _control(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            if environ["REQUEST_METHOD"] == "POST":
                self._faults = [
                    Fault(**one)
                    for one in json.loads(
                        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                    )
                ]
                self._seen = []
                self._lifted.set()
                self._lifted = threading.Event()
            body = json.dumps(self._seen).encode()
        start_response(
            "200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        )
        return [body]


def _without(entry: bytes, hidden: str) -> bytes:
    key = re.search(rb"<Key>(.*?)</Key>", entry)
    return b"" if key is not None and re.search(hidden, key.group(1).decode()) else entry


def _error(start_response: Any, status: str) -> Iterable[bytes]:
    code = {
        "429": "TooManyRequests",
        "500": "InternalError",
        "501": "NotImplemented",
        "503": "SlowDown",
    }[status]
    error = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    body = f'<?xml version="1.0"?>{error}'.encode()
    start_response(
        f"{status} {code}",
        [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
    )
    return [body]


def _drop(environ: dict[str, Any]) -> Iterable[bytes]:
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def serve() -> None:
    """Serve on a free port of the loopback until standard input is closed."""
    import logging

    from moto.server import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def log(self, kind: str, message: str, *args: object) -> None:
            pass

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    # Not moto's choice of a service by the request, which looks at a hundred folders each time.
    app = _Faulty(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve()
