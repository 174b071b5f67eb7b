"""The server of ``view``: the page gets verified data, and nobody else gets anything."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.inspection.compare import Side
from deltacheck.cli.view import server as server_module
from deltacheck.cli.view.queries import MOST_VALUES, BadQuery, Queries, parse_box
from deltacheck.cli.view.server import MOST_CONNECTIONS, ViewServer
from deltacheck.maintain import drift
from deltacheck.report.change_map import change_map
from deltacheck.restore import export
from deltacheck.store.roots.opening import open_root
from tests.support.forge import GOLDEN, unpack
from tests.support.hostile import NAMES, save_hostile
from tests.support.s3_server import S3
from tests.support.waiting import wait_until

PAGE = Path(server_module.__file__).with_name("page")
ROOTS = sorted(path.name.split(".")[0] for path in GOLDEN.glob("*.tar.xz"))


class Client:
    """A client of a server, which sends what it is told to, byte for byte."""

    def __init__(self, server: ViewServer) -> None:
        self.port = server.server_port
        self.prefix = server.url.partition(f":{self.port}")[2]

    def send(self, text: str) -> tuple[int, dict[str, str], bytes]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=240) as connection:
            connection.sendall(text.encode("latin-1"))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def get(
        self, path: str = "", method: str = "GET", host: str | None = None, headers: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        host = f"Host: 127.0.0.1:{self.port}\r\n" if host is None else host
        return self.send(f"{method} {self.prefix}{path} HTTP/1.1\r\n{host}{headers}\r\n")

    def json(self, query: str, **parameters: Any) -> Any:
        text = f"?{urlencode(parameters)}" if parameters else ""
        _, headers, content = self.get(f"api/{query}{text}")
        assert headers["content-type"] == "application/json; charset=utf-8"
        document = json.loads(content, parse_constant=lambda name: pytest.fail(name))
        assert document.pop("schema") == 1
        return document


@contextmanager
def serving(root: object) -> Iterator[Client]:
    with ViewServer(Queries(str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("view") / "root"
    save_hostile(root)
    return root


@pytest.fixture(scope="module")
def client(hostile: Path) -> Iterator[Client]:
    with serving(hostile) as client:
        yield client


# --- requests that are refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "ODD"]
)
def test_only_get_and_head_are_answered(client: Client, method: str) -> None:
    status, headers, content = client.get(method=method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert content == b"deltacheck view: only GET and HEAD are answered\n"


def test_head_has_the_headers_of_get_without_content(client: Client) -> None:
    request = f"HEAD {client.prefix} HTTP/1.1\r\nHost: localhost:{client.port}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=240) as connection:
        connection.sendall(request.encode())
        connection.shutdown(socket.SHUT_WR)
        head = b"".join(iter(lambda: connection.recv(65536), b""))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
    assert f"Content-Length: {len(client.get()[2])}\r\n".encode() in head


@pytest.mark.parametrize(
    "host",
    [
        "",
        "Host:\r\n",
        "Host: example.com\r\n",
        "Host: example.com:{port}\r\n",
        "Host: 127.0.0.1\r\n",
        "Host: 127.0.0.1:1\r\n",
        "Host: localhost.example.com:{port}\r\n",
        "Host: 127.0.0.1:{port}.example.com\r\n",
        "Host: evil@127.0.0.1:{port}\r\n",
        "Host: 0.0.0.0:{port}\r\n",
        "Host: 127.0.0.1:{port}\r\nHost: example.com\r\n",
        "X-Forwarded-Host: 127.0.0.1:{port}\r\nHost: example.com\r\n",
    ],
)
def test_other_hosts_are_refused(client: Client, host: str) -> None:
    status, _, content = client.get(host=host.replace("{port}", str(client.port)))
    assert status == 421
    assert b"<" not in content


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost"])
def test_loopback_names_are_served(client: Client, host: str) -> None:
    assert client.get(host=f"Host: {host}:{client.port}\r\n")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "unheard-of"])
def test_requests_of_other_pages_are_refused(client: Client, site: str) -> None:
    assert client.get("api/steps", headers=f"Sec-Fetch-Site: {site}\r\n")[0] == 403
    assert client.get("api/steps", headers="Sec-Fetch-Site: same-origin\r\n")[0] == 200


def test_a_request_with_content_is_refused_and_its_content_is_no_request(client: Client) -> None:
    smuggled = f"GET {client.prefix}api/steps HTTP/1.1\r\nHost: localhost:{client.port}\r\n\r\n"
    for header in (f"Content-Length: {len(smuggled)}", "Transfer-Encoding: chunked"):
        request = (
            f"GET {client.prefix} HTTP/1.1\r\nHost: localhost:{client.port}\r\n{header}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", client.port), timeout=240) as connection:
            connection.sendall((request + smuggled).encode())
            received = b""
            while part := connection.recv(65536):
                received += part
        assert received.startswith(b"HTTP/1.1 400 ")
        assert received.count(b"HTTP/1.1") == 1


def test_a_request_that_cannot_be_read_is_refused(client: Client) -> None:
    host = f"Host: localhost:{client.port}\r\n"
    for text, expected in (
        ("nonsense\r\n\r\n", 400),
        (f"GET {client.prefix} HTTP/9.9\r\n{host}\r\n", 505),
        (f"GET {'x' * 70_000} HTTP/1.1\r\n{host}\r\n", 414),
        (f"GET {client.prefix} HTTP/1.1\r\n{host}Long: {'x' * 70_000}\r\n\r\n", 431),
    ):
        status, _, content = client.send(text)
        assert status == expected
        assert b"xxx" not in content


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "../../../../../../etc/passwd",
        "..%2fsecret",
        "..%2Fsecret",
        "%2e%2e/secret",
        "%2e%2e%2fsecret",
        "..%252fsecret",
        "..\\secret",
        "..%5csecret",
        "./app.mjs",
        "app%2emjs",
        "app.mjs/",
        "app.mjs/../app.mjs",
        "/app.mjs",
        "/etc/passwd",
        "file:///etc/passwd",
        "page/app.mjs",
        "server.py",
        "../server.py",
        "link",
        "zarr.json",
        "checkpoints/c0000000000/zarr.json",
        "api/",
        "api/../app.mjs",
        "api/unheard-of",
        "api%2fsteps",
        "api/steps/",
        "__class__",
        "app.mjs%00",
        "app.mjs;x",
    ],
)
def test_no_address_leads_to_a_file(hostile: Path, client: Client, path: str) -> None:
    outside, link = hostile.parent / "secret", hostile / "link"
    if not link.is_symlink():
        outside.write_text("content outside of the root")
        link.symlink_to(outside)
    status, _, content = client.get(path)
    assert (status, content) == (404, b"deltacheck view: there is no such page\n")
    absolute = f"http://localhost:{client.port}{client.prefix}{path}"
    request = f"GET {absolute} HTTP/1.1\r\nHost: localhost:{client.port}\r\n\r\n"
    assert client.send(request)[0] == 404


def test_without_the_secret_of_the_address_nothing_is_served(client: Client) -> None:
    for path in ("/", "/app.mjs", "/api/steps", client.prefix[:-2] + "/", "/" + "x" * 24 + "/"):
        request = f"GET {path} HTTP/1.1\r\nHost: localhost:{client.port}\r\n\r\n"
        assert client.send(request)[0] == 404
    assert len(client.prefix) == 26  # 144 random bits


def test_the_server_listens_on_loopback_only(hostile: Path) -> None:
    with ViewServer(Queries(str(hostile))) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_every_answer_forbids_scripts_and_sources_from_elsewhere(client: Client) -> None:
    for path, method in (("", "GET"), ("api/steps", "GET"), ("x", "GET"), ("", "POST")):
        _, headers, _ = client.get(path, method)
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["connect-src"] == policy["style-src"] == policy["img-src"] == "'self'"
        assert policy["script-src"] == "'self' 'wasm-unsafe-eval'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_the_page_has_no_inline_script_and_makes_no_markup_from_text() -> None:
    texts = {path.name: path.read_text() for path in PAGE.rglob("*.*") if path.is_file()}
    assert "index.html" in texts
    markup = texts["index.html"]
    assert re.findall(r"<script[^>]*>(.*?)</script>", markup, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", markup)
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write(ln)?\(|DOMParser"
    forbidden += r"|\beval\b|Function\("
    for name, text in texts.items():
        assert not re.search(forbidden, text), name
        assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}, name


# --- what the page is given -----------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    main([*map(str, words), "--json"])
    document = json.loads(capsys.readouterr().out)
    del document["schema"]
    return document


@pytest.mark.parametrize("name", ROOTS)
def test_the_page_shows_the_documents_of_the_commands(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = unpack(name, tmp_path)
    steps = deltacheck.open(root).steps()
    with serving(root) as client:
        for query, command in (("steps", "ls"), ("log", "log")):
            document = client.json(query)
            assert document.pop("problems") == []
            assert document == printed(capsys, command, root)
        for step in steps:
            document = client.json("show", step=step)
            groups = document.pop("groups")
            assert all(row.pop("text") for row in document["scalars"])
            assert document == printed(capsys, "show", root, step)
            members = [path for group in groups for path in group["members"]]
            assert sorted(members) == sorted(leaf["path"] for leaf in document["leaves"])
        checked = client.json("verify", step="", deep="1")
        assert checked == printed(capsys, "verify", root, "--deep")
        diff = client.json("diff", before=steps[0], after=steps[-1])
        command = printed(capsys, "diff", root, steps[0], steps[-1])
        # Leaves that ranks have only cut into other tiles have other digests, too.
        assert {row["path"] for row in command["changed"]} <= {
            row["path"] for row in diff["changed"]
        }
        for row in command["changed"]:
            result = client.json("change", before=steps[0], after=steps[-1], leaf=row["path"])
            assert result.pop("map")["changed"] == row["changed"]
            assert result == row
        sides = [row[side] for row in diff["scalars"] for side in ("before", "after") if row[side]]
        assert all(side.pop("text") for side in sides)
        for key in ("added", "removed", "reshaped", "scalars"):
            assert diff[key] == command[key]


def numbers(texts: list[str], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Read values that the page shows."""
    if dtype.kind in "iu" or dtype.name in ("int2", "int4", "uint2", "uint4"):
        return np.array([int(text) for text in texts], object).astype(dtype)
    if dtype.name == "bool":
        return np.array([text == "True" for text in texts])
    return np.array([complex(text) if dtype.kind == "c" else float(text) for text in texts]).astype(
        dtype
    )


@pytest.mark.parametrize("name", ROOTS)
def test_the_values_of_a_slice_are_those_of_a_restore(name: str, tmp_path: Path) -> None:
    root = unpack(name, tmp_path)
    reader = deltacheck.open(root)
    compared = 0
    with serving(root) as client:
        for step in reader.steps():
            for row in client.json("show", step=step)["leaves"]:
                box = ", ".join(f"0:{min(size, 3)}" for size in row["shape"])
                document = client.json("values", step=step, leaf=row["path"], box=box)
                restored = reader.restore(step, leaves=[row["path"]])[row["path"]]
                part = restored.reshape(row["shape"])[tuple(slice(0, 3) for _ in row["shape"])]
                assert document["shape"] == list(part.shape)
                read = numbers(document["values"], part.dtype).reshape(part.shape)
                # NumPy knows no NaN in the types of ml_dtypes.
                if "float" in part.dtype.name:
                    read, part = read.astype(np.float64), part.astype(np.float64)
                np.testing.assert_array_equal(read, part)
                compared += part.size
    assert compared > 0


def test_hostile_names_are_only_data(client: Client) -> None:
    leaves = {leaf["path"] for leaf in client.json("show", step=1)["leaves"]}
    assert len(leaves) == len(NAMES)
    for path in leaves:
        assert client.json("values", step=1, leaf=path, box="")["values"] == ["1.0"] * 4
        assert client.json("change", before=0, after=1, leaf=path)["changed"] == 4
    raw = client.get("api/show?step=1")[2]
    assert raw.isascii()
    assert json.loads(raw)["metrics"] == dict.fromkeys(NAMES, 1.0)


@pytest.mark.parametrize(
    ("query", "parameters", "status", "kind"),
    [
        ("show", {"step": "7"}, 404, "StepNotFound"),
        ("show", {"step": "@gone"}, 404, "StepNotFound"),
        ("show", {"step": "../1"}, 400, "Misuse"),
        ("show", {"step": ""}, 400, "Misuse"),
        ("show", {}, 400, "Misuse"),
        ("show", {"step": "1", "more": "1"}, 400, "Misuse"),
        ("values", {"step": "1", "leaf": "gone", "box": ""}, 404, "LeafNotFound"),
        ("values", {"step": "1", "leaf": "arrays/constructor", "box": "9"}, 400, "Misuse"),
        ("values", {"step": "1", "leaf": "arrays/constructor", "box": "0,0"}, 400, "Misuse"),
        ("values", {"step": "1", "leaf": "arrays/constructor", "box": "::2"}, 400, "Misuse"),
        ("change", {"before": "0", "after": "1", "leaf": "gone"}, 404, "LeafNotFound"),
        ("verify", {"step": "", "deep": "yes"}, 400, "Misuse"),
    ],
)
def test_a_wrong_query_is_answered_with_its_error(
    client: Client, query: str, parameters: dict[str, str], status: int, kind: str
) -> None:
    result, _, content = client.get(f"api/{query}?{urlencode(parameters)}")
    assert (result, json.loads(content)["error"]["kind"]) == (status, kind)


def test_a_parameter_is_named_once_and_readable(client: Client) -> None:
    for text in ("step=1&step=0", "step=%ff", "step", "&".join(f"p{i}=1" for i in range(99))):
        assert client.get(f"api/show?{text}")[0] == 400


def test_large_integers_come_as_texts(tmp_path: Path) -> None:
    with Engine(tmp_path / "root") as engine:
        for step in (0, 1):
            engine.save(step, {"seed": 2**63 + step, "w": np.array([2**63 + step])}).wait()
    with serving(tmp_path / "root") as client:
        (seed,) = client.json("show", step=1)["scalars"]
        assert seed["text"] == "9223372036854775809"
        (seed,) = client.json("diff", before=0, after=1)["scalars"]
        assert (seed["before"]["text"], seed["after"]["text"]) == (str(2**63), str(2**63 + 1))
        assert client.json("values", step=1, leaf="w", box="0")["values"] == [str(2**63 + 1)]


def test_a_slice_has_a_limit(tmp_path: Path) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"w": np.arange(MOST_VALUES + 1)}).wait()
    with serving(tmp_path / "root") as client:
        error = client.json("values", step=0, leaf="w", box="")["error"]
        assert f"has {MOST_VALUES + 1} values, more than {MOST_VALUES}" in error["message"]
        assert len(client.json("values", step=0, leaf="w", box="1:")["values"]) == MOST_VALUES


def test_damage_is_shown_and_the_rest_is_still_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    random = np.random.default_rng(0)
    with Engine(root) as engine:
        for step in (0, 1):
            state = {name: random.integers(0, 99, 100_000) for name in ("good", "bad", "linked")}
            engine.save(step, state).wait()
    leaves = min((root / "segments").glob("s*-*")) / "leaves"
    (file,) = (path for path in (leaves / "bad").rglob("c*") if path.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    # The same bytes, but outside of the root.
    (file,) = (path for path in (leaves / "linked").rglob("c*") if path.is_file())
    outside = tmp_path / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)
    with serving(root) as client:
        assert len(client.json("steps")["steps"]) == 2
        for leaf in ("bad", "linked"):
            error = client.json("values", step=1, leaf=leaf, box="0:4")["error"]
            assert (error["kind"], error["exit_code"]) == ("Damaged", 4)
            assert leaf in error["message"]
            assert client.json("change", before=0, after=1, leaf=leaf)["error"]["kind"] == "Damaged"
        assert "values" in client.json("values", step=1, leaf="good", box="0:4")
        findings = client.json("verify", step="", deep="1")["findings"]
        assert {finding["leaf"] for finding in findings} == {"bad", "linked"}


def test_new_steps_appear_while_the_server_runs(tmp_path: Path) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"w": np.zeros(3)}).wait()
        with serving(tmp_path / "root") as client:
            assert len(client.json("steps")["steps"]) == 1
            engine.save(1, {"w": np.ones(3)}).wait()
            assert [row["step"] for row in client.json("steps")["steps"]] == [0, 1]
            assert client.json("values", step="latest", leaf="w", box="0")["values"] == ["1.0"]


def test_an_object_store_is_shown_as_a_folder_is(s3: S3) -> None:
    address = "s3://bucket/view/run"
    with Engine(address) as engine:
        engine.save(3, {"w": np.arange(5.0)}).wait()
    with serving(address) as client:
        assert [row["step"] for row in client.json("steps")["steps"]] == [3]
        (row,) = client.json("log")["steps"]
        assert row["causes"]["keyframe"] > 0
        assert sum(row["causes"].values()) == row["written_bytes"]
        assert client.json("values", step=3, leaf="w", box="4")["values"] == ["4.0"]


# --- maps and slices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 0), (7,), (1000,), (300, 500), (5, 7, 11), (49, 97)]
)
def test_a_map_has_the_share_of_changed_elements_of_each_cell(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(shape))
    changed = random.random(shape) < 0.2
    flat = np.flatnonzero(changed)
    result = change_map(shape, [flat[: flat.size // 2], flat[flat.size // 2 :]])
    table = changed.reshape(result.height, result.width)
    assert result.changed == changed.sum()
    assert result.rows <= 48
    assert result.columns <= 96
    assert len(result.shares) == result.rows * result.columns
    rows, columns = (
        [size * i // max(1, cells) for i in range(cells + 1)]
        for size, cells in ((result.height, result.rows), (result.width, result.columns))
    )
    expected = [
        table[top:bottom, left:right].mean()
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]
    np.testing.assert_allclose(result.shares, expected)


@pytest.mark.parametrize("name", ["tiled", "manager", "derived"])
def test_changed_elements_are_those_whose_bits_differ(name: str, tmp_path: Path) -> None:
    root = open_root(unpack(name, tmp_path))
    first, last = (Side.of(root, root.manifest(step)) for step in (root.steps()[0], None))
    reader = deltacheck.open(root.path)
    compared = 0
    for path in sorted(first.owners.keys() & last.owners.keys()):
        if first.spec(path) != last.spec(path):
            continue
        result = drift.changed_elements(first.leaves([path])[path], last.leaves([path])[path])
        old, new = (
            reader.restore(side.manifest.step, leaves=[path])[path] for side in (first, last)
        )
        size = old.dtype.itemsize
        bits = [
            np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, size) for a in (old, new)
        ]
        expected = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
        np.testing.assert_array_equal(np.concatenate([[], *result]), expected)
        compared += expected.size
    assert compared > 0


def test_changes_of_a_few_chunks_are_at_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "BATCH_BYTES", 2 << 20)
    before = np.zeros((6, 300, 1000), np.float32)
    after = before.copy()
    # Neither the first chunk nor neighbours, and more than a batch.
    positions = np.array([700_000, 700_001, 1_200_000, 1_799_998])
    after.reshape(-1)[positions] = 1
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"w": before}).wait()
        engine.save(1, {"w": after}).wait()
    root = open_root(tmp_path / "root")
    first, last = (Side.of(root, root.manifest(step)).leaves(["w"])["w"] for step in (0, 1))
    assert first.spec.chunk_count > 6
    batches = list(drift.changed_elements(first, last))
    assert len(batches) > 1
    np.testing.assert_array_equal(np.concatenate(batches), positions)


def test_slices_are_written_as_in_numpy() -> None:
    assert parse_box("") == parse_box("  ") == []
    assert parse_box("0:8, 3, :") == [slice(0, 8), 3, slice(None)]
    assert parse_box("-2:,-1") == [slice(-2, None), -1]


@given(st.text(alphabet="0123456789-+:,. ²٣eabc", max_size=12) | st.text(max_size=8))
def test_a_text_is_slices_or_refused(text: str) -> None:
    try:
        box = parse_box(text)
    except BadQuery:
        return
    assert all(isinstance(part, int) or part.step is None for part in box)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes take an interrupt, which those of a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_command_prints_its_address_and_ends_with_an_interrupt(hostile: Path) -> None:
    command = [sys.executable, "-m", "deltacheck", "view", str(hostile), "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        url = json.loads("".join(lines))["url"]
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{24}/)", url)
        assert match is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=240)
        connection.request("GET", match[2])
        assert connection.getresponse().status == 200
        # The connection stays open, and must not keep the server from ending.
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
            connection.close()
    assert process.returncode == 130
    assert json.loads(errors)["error"]["exit_code"] == 130


@pytest.fixture
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ViewServer, "serve_forever", lambda self: None)


@pytest.mark.usefixtures("no_service")
def test_a_port_in_use_and_a_missing_root_are_refused(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["view", str(hostile), "--port", str(port)]) == 5
    assert "--port" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "gone")]) == 3
    assert main(["view", str(hostile), "--port", "70000"]) == 2


@pytest.fixture
def server(hostile: Path) -> Iterator[ViewServer]:
    with ViewServer(Queries(str(hostile))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_idle_connections_are_limited_and_their_places_are_given_back(server: ViewServer) -> None:
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(server.server_address[:2], 60))
            for _ in range(MOST_CONNECTIONS)
        ]
        # Accepted in order: when this one is closed, all others have a thread.
        with socket.create_connection(server.server_address[:2], 60) as late:
            assert late.recv(1) == b""
        for connection in idle:
            connection.close()
    assert wait_until(lambda: get_status(server)) == 404


def get_status(server: ViewServer) -> int | None:
    """Return the status of a request; ``None``: the connection was closed."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=240)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except (ConnectionError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def test_a_request_that_is_sent_byte_by_byte_is_given_up(server: ViewServer) -> None:
    calls, now = threading.Semaphore(0), [0.0]

    def clock() -> float:
        calls.release()
        return now[0]

    server.clock = clock
    with socket.create_connection(server.server_address[:2], 60) as slow:
        slow.sendall(b"GET / ")
        # Before the first piece was read, and after it.
        assert calls.acquire(timeout=240)
        assert calls.acquire(timeout=240)
        now[0] = 61.0
        # Whether it is still read or not, the request is not complete.
        slow.sendall(b"HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
