"""The server of ``view``: a few fixed addresses on loopback, read-only.

No address is a path of a file, neither of the root nor of the machine. The files of the page are
looked up in a table, and everything else is a query that the reader answers.
"""

from __future__ import annotations

import hmac
import io
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl

from deltacheck.cli import output
from deltacheck.cli.view.queries import BadQuery, Queries

LOOPBACK = "127.0.0.1"
# A page of another site whose name leads to this address sends its own name (DNS rebinding).
_HOSTS = (LOOPBACK, "localhost")

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_START = "index.html"

# Nothing is loaded from elsewhere and nothing is sent there. No script or style stands in the
# markup, and no text becomes markup: browsers with trusted types refuse ``innerHTML``. WebAssembly
# computes the checksums of local folders.
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self';"
    " connect-src 'self'; img-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# A connection that sends nothing for this long is closed.
_IDLE_SECONDS = 60
# A request that is not complete after this time is given up.
_REQUEST_SECONDS = 60
# Each connection has a thread. A browser opens six.
MOST_CONNECTIONS = 64
_MOST_PARAMETERS = 8


class Answer(NamedTuple):
    """The status, the type and the content of an answer."""

    status: HTTPStatus
    type: str
    content: bytes


class ViewServer(ThreadingHTTPServer):
    """A server for one root on loopback.

    Args:
        queries: The queries on the root.
        port: The port; 0: any that is free.

    Attributes:
        url: The address of the page. It contains a secret, so that other users of the machine
            cannot read the root.
    """

    daemon_threads = True
    # Connections that wait to be accepted. With the default of 5, the next ones wait for seconds.
    request_queue_size = MOST_CONNECTIONS
    clock = staticmethod(time.monotonic)

    def __init__(self, queries: Queries, port: int = 0) -> None:
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((LOOPBACK, port), _Connection)
        self._queries = queries
        self._prefix = f"/{secrets.token_urlsafe(18)}/"
        self._files = page_files()
        self.hosts = frozenset(f"{host}:{self.server_port}" for host in _HOSTS)
        self.url = f"http://{LOOPBACK}:{self.server_port}{self._prefix}"

    def server_bind(self) -> None:
        """Bind the socket, without a look-up of the machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; close it if there are too many."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a defect; a connection that the browser has closed is none."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def answer(self, target: str) -> Answer:
        """Return the answer to a request of the page.

        Args:
            target: The request target as it was sent. Nothing of its path is decoded.
        """
        path, _, text = target.partition("?")
        begin = path[: len(self._prefix)]
        if not hmac.compare_digest(begin.encode(), self._prefix.encode()):
            return refusal(
                HTTPStatus.NOT_FOUND, "the page is at the address that deltacheck has printed"
            )
        name = path[len(self._prefix) :]
        file = self._files.get(name or _START)
        if file is not None:
            return file
        query = name.removeprefix("api/")
        if query == name or query not in self._queries.names:
            return refusal(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            document = self._queries.answer(query, _parameters(text))
        except BadQuery as error:
            return _failed(HTTPStatus.BAD_REQUEST, output.Failure("Misuse", str(error), 2))
        except Exception as error:  # noqa: BLE001 - the page shows it; the server goes on
            failure = output.failure_of(error)
            status = (
                HTTPStatus.NOT_FOUND
                if failure.code == output.NOT_FOUND
                else HTTPStatus.INTERNAL_SERVER_ERROR
                if failure.code == output.DEFECT
                else HTTPStatus.CONFLICT
            )
            return _failed(status, failure)
        return Answer(HTTPStatus.OK, _JSON, output.as_json(document).encode())


def page_files() -> dict[str, Answer]:
    """Return the files of the page by their addresses."""
    page = resources.files(__package__) / "page"
    return {
        file.name: Answer(HTTPStatus.OK, type, file.read_bytes())
        for file in page.iterdir()
        if (type := _TYPES.get("." + file.name.rpartition(".")[2])) is not None
    }


def refusal(status: HTTPStatus, text: str) -> Answer:
    """Return an answer that refuses a request. It repeats nothing of the request."""
    return Answer(status, _TEXT, f"deltacheck view: {text}\n".encode())


def _failed(status: HTTPStatus, failure: output.Failure) -> Answer:
    error = {"kind": failure.kind, "message": failure.message, "exit_code": failure.code}
    return Answer(status, _JSON, output.as_json({"error": error}).encode())


def _parameters(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=bool(text),
            errors="strict",
            max_num_fields=_MOST_PARAMETERS,
        )
    except ValueError:
        raise BadQuery("the parameters of the address cannot be read") from None
    if len(dict(pairs)) != len(pairs):
        raise BadQuery("a parameter is named twice")
    return dict(pairs)


class _TimedSocket(io.RawIOBase):
    """A socket to read from, with a limit of time for all reads of a request together."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float]) -> None:
        self._connection, self._clock = connection, clock
        self.begin()

    def begin(self) -> None:
        """Begin a request."""
        self._end: float | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        now = self._clock()
        # The time begins with the first bytes: a browser keeps connections that it may use later.
        seconds = _IDLE_SECONDS if self._end is None else self._end - now
        if seconds <= 0:
            raise TimeoutError(f"a request took longer than {_REQUEST_SECONDS} s")
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(buffer)
        self._connection.settimeout(_IDLE_SECONDS)  # of the answer
        if self._end is None:
            self._end = self._clock() + _REQUEST_SECONDS
        return count


class _Connection(BaseHTTPRequestHandler):
    """A connection."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version = "deltacheck"
    sys_version = ""
    timeout = _IDLE_SECONDS

    def setup(self) -> None:
        """Read from the socket with a limit for each request."""
        super().setup()
        self.rfile = io.BufferedReader(_TimedSocket(self.connection, clock=self.server.clock))

    def handle_one_request(self) -> None:
        """Answer a request that is complete in time."""
        cast("_TimedSocket", self.rfile.raw).begin()  # type: ignore[attr-defined]
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request."""
        self._send(self._refused() or self.server.answer(self.path))

    def do_HEAD(self) -> None:
        """Answer a request, without the content."""
        self.do_GET()

    def _refused(self) -> Answer | None:
        """Return the refusal of a request whose headers do not come from the page."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return refusal(
                HTTPStatus.MISDIRECTED_REQUEST, "only 127.0.0.1 and localhost are served"
            )
        # Browsers say if a page of another site, or of another port, has sent the request.
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return refusal(HTTPStatus.FORBIDDEN, "requests of other pages are refused")
        # The content of a request would be read as the next one.
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            return refusal(HTTPStatus.BAD_REQUEST, "a request has no content")
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that ``http.server`` does not pass on."""
        # Only methods without a ``do_`` function of this class lead to this status.
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code = HTTPStatus.METHOD_NOT_ALLOWED
        text = "only GET and HEAD are answered" if code == 405 else "the request cannot be read"
        # For a request line that cannot be read, these attributes are not yet there.
        self.command = getattr(self, "command", None) or "GET"
        self.request_version = self.protocol_version
        self._send(refusal(HTTPStatus(code), text))

    def _send(self, answer: Answer) -> None:
        if answer.status != HTTPStatus.OK and answer.type == _TEXT:
            self.close_connection = True
        self.send_response(answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", answer.type)
        self.send_header("Content-Length", str(len(answer.content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the terminal belongs to the command."""
