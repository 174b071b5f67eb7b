"""Show roots in headless Chromium and look at the page: `make view-test`.

Without Chromium, the check is skipped with one line. Debian's package is `chromium`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.cli.view.queries import Queries
from deltacheck.cli.view.server import ViewServer
from tests.support.forge import GOLDEN, unpack
from tests.support.hostile import NAMES, save_hostile
from tests.support.waiting import wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_SECONDS = 30
# A view is complete, with the first of the pictures that it draws when they come into sight.
READY = (
    "document.querySelector('main[data-ready]') !== null &&"
    " document.querySelector('#sizes .quiet') === null &&"
    " document.querySelector('section.change:first-of-type:not([data-drawn])') === null"
)
# A leaf of which this block of elements changes.
BLOCK = (slice(30, 60), slice(100, 300))


class Dom(HTMLParser):
    """The content of a page after its scripts have run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, **attributes: str) -> int:
        """Count the elements of a tag with these attributes."""
        return sum(
            element == tag and attributes.items() <= values.items() for element, values in self.tags
        )


class Browser:
    """Headless Chromium with a profile of its own, driven by the protocol of its developer tools.

    Attributes:
        requests: The addresses of all requests of the pages.
    """

    def __init__(self, program: str, folder: Path) -> None:
        command = [
            program,
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={folder / 'profile'}",
            "--remote-debugging-pipe",
            # No name leads anywhere but to this machine.
            "--host-resolver-rules=MAP * 127.0.0.1",
        ]
        # Chromium's sandbox needs a user that is not root.
        if os.geteuid() == 0:
            command.append("--no-sandbox")
        # The browser reads commands from descriptor 3, and answers on descriptor 4.
        inner_in, self._out = os.pipe()
        self._in, inner_out = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{inner_in} 4>&{inner_out}', "bash", *command],
            pass_fds=(inner_in, inner_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(inner_in)
        os.close(inner_out)
        self._number = 0
        self._received = b""
        self._errors: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self._send(f"{domain}.enable")
        self.resize(1100, 1900)

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, in pixels."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        try:
            self._process.wait(240)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def _send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> Any:
        while b"\0" not in self._received:
            assert select.select([self._in], [], [], WAIT_SECONDS)[0], "the browser is silent"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        parameters = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        # Exceptions, and violations of the policy of the page.
        elif (
            message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
            and parameters.get("entry", {}).get("level", "error") == "error"
        ):
            self._errors.append(json.dumps(parameters))
        return message

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        result = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        wait_until(lambda: self.evaluate(condition))

    def open(self, url: str, until: str = READY, errors: bool = False) -> Dom:
        """Open a page, and return its content as ``dom`` does."""
        # A change after the # alone would not load the page anew.
        self._send("Page.navigate", url="about:blank")
        self._errors.clear()
        self._send("Page.navigate", url=url)
        return self.dom(until, errors)

    def dom(self, until: str = READY, errors: bool = False) -> Dom:
        """Return the content of the page once an expression is true.

        Args:
            until: The expression.
            errors: If false, an error of the page fails the test.
        """
        self.wait(until)
        assert errors or not self._errors, self._errors
        return Dom(self.evaluate("document.documentElement.outerHTML"))

    def picture(self, file: Path) -> np.ndarray:
        """Return a picture of the page, uint8 (height, width, channels), and keep it as a PNG."""
        from matplotlib.image import imread

        file.write_bytes(base64.b64decode(self._send("Page.captureScreenshot")["data"]))
        return (imread(file) * 255).round().astype(np.uint8)


@contextmanager
def serving(root: Path) -> Iterator[Callable[..., str]]:
    """Serve a root; yield a function that returns the address of a view."""
    with ViewServer(Queries(str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield (
                lambda view, **parameters: f"{server.url}#{urlencode({'view': view, **parameters})}"
            )
        finally:
            server.shutdown()
            thread.join()


def golden(browser: Browser, folder: Path, pictures: Path) -> None:
    """Show each view of each golden root."""
    for name in sorted(path.name.split(".")[0] for path in GOLDEN.glob("*.tar.xz")):
        root = unpack(name, folder / name)
        steps = deltacheck.open(root).steps()
        with serving(root) as address:
            views = {
                "steps": address("steps"),
                "step": address("step", step=steps[-1]),
                "diff": address("diff", before=steps[0], after=steps[-1]),
                "check": address("check", step="", deep="1"),
            }
            for view, url in views.items():
                browser.open(url)
                ready = f"document.querySelector('main').dataset.ready === {json.dumps(view)}"
                page = browser.dom(f"{READY} && {ready}")
                place = (name, view)
                assert page.count("div", **{"class": "problems"}) == 0, (place, page.text)
                if view == "steps":
                    assert f"{len(steps)} step" in page.text, place
                    assert page.count("svg", role="img") == 1, place
                if view == "check":
                    assert "without a finding" in page.text, place


def hostile(browser: Browser, folder: Path, pictures: Path) -> None:
    """Show a root whose names are markup, scripts, and controls of the direction of text."""
    root = folder / "hostile"
    save_hostile(root)
    path = next(p for p in deltacheck.open(root).manifest(1).leaves if "img" in p)
    with serving(root) as address:
        addresses = {
            "steps": address("steps"),
            "step": address("step", step=1),
            "diff": address("diff", before=0, after=1),
            "leaf": address("leaf", step=1, leaf=path),
        }
        # An address is also written by others.
        wrong = {
            "address": address("leaf", step=1, leaf=NAMES[0], box=NAMES[1]),
            "constructor": address("constructor", step=NAMES[0]),
            "markup": address("step", step=NAMES[1]),
        }
        for name, url in (addresses | wrong).items():
            browser.open(url, errors=name in wrong)
            # A query that the server refuses is an error on the browser's console.
            page = browser.dom(errors=name in wrong)
            assert_harmless(page, name)
            assert "owned" not in browser.evaluate("document.title")
            if name in ("steps", "step", "diff"):
                browser.picture(pictures / f"hostile-{name}.png")
            if name == "diff":
                assert "<script>document.title='owned'<%2Fscript>" in page.text
                assert "right\\u{202e}ot tfel" in page.text
        # A name of another site that leads to this address (DNS rebinding).
        rebound = addresses["steps"].replace("127.0.0.1", "rebound.example")
        browser.open(rebound, "document.body.innerText.includes('only 127.0.0.1')", errors=True)
        assert browser.evaluate("document.querySelector('main')") is None


def assert_harmless(page: Dom, place: object) -> None:
    """Assert that a page has no element, attribute or script but its own."""
    assert page.count("script") == page.count("h1") == 1, place
    assert page.count("img") == page.count("b") == page.count("iframe") == 0, place
    for _, attributes in page.tags:
        assert not any(key.startswith("on") for key in attributes), place
        assert not (attributes.get("href") or "").startswith("javascript"), place
    for character in "\u202e\u2066\u2069\u2029\u200b\x1b":
        assert character not in page.text, (place, character)


def changes(browser: Browser, folder: Path, pictures: Path) -> None:
    """Look at the heat map of a block of changed elements, and at damage."""
    root = folder / "block"
    noise = np.random.default_rng(0).integers(0, 99, 300_000)
    with Engine(root) as engine:
        for step in range(4):
            weight = np.zeros((300, 500), np.float32)
            weight[BLOCK] = step
            layers = [{"w": weight.copy(), "b": np.ones(9)} for _ in range(3)]
            state = {"layers": layers, "noise": noise, "options": list(range(40))}
            engine.save(step, state | {"lr": 0.1 / (step + 1)}, metrics={"loss": 1.0}).wait()
            noise = noise + 1
    with serving(root) as address:
        diff = address("diff", before=0, after=3)
        browser.open(address("steps"))
        browser.evaluate(f"location.hash = {json.dumps('#' + diff.split('#')[1])}")
        complete = "document.querySelectorAll('section[data-drawn]').length === 4"
        page = browser.dom(complete)
        assert page.text.count("6000 of 150000 elements changed (4 %)") == 3
        # A map of one colour is not drawn: all elements of the noise have changed.
        assert browser.evaluate("document.querySelectorAll('section canvas').length") == 3
        assert page.text.count("the same share in all parts of the leaf") == 1
        picture = browser.picture(pictures / "diff.png")
        # The colour of cells that have changed altogether: a block of each map.
        dark = (np.abs(picture[..., :3].astype(int) - (8, 29, 88)) <= 2).all(axis=2)
        assert dark.sum() > 3 * 2000, dark.sum()
        leaf = address("leaf", step=3, leaf="layers/0/w", box="29:32, 99:102")
        browser.evaluate(f"location.hash = {json.dumps('#' + leaf.split('#')[1])}")
        browser.wait("document.querySelectorAll('main td').length === 3 * 4")
        cells = "[...document.querySelectorAll('main td')].map((cell) => cell.innerText)"
        zero, three = "0.0", "3.0"
        assert browser.evaluate(cells) == [
            *("29", zero, zero, zero),
            *("30", zero, three, three),
            *("31", zero, three, three),
        ]
        for name, url in {
            "steps": address("steps"),
            "step": address("step", step=3),
            "leaf": address("leaf", step=3, leaf="layers/0/w", box="28:36, 96:104"),
        }.items():
            browser.open(url)
            browser.picture(pictures / f"{name}.png")
        # A step fits three screens, and nothing scrolls sideways on a narrow one.
        browser.resize(1280, 800)
        browser.open(address("step", step=3))
        assert browser.evaluate("document.documentElement.scrollHeight") <= 3 * 800
        browser.evaluate("document.querySelectorAll('summary').forEach((one) => one.click())")
        browser.wait("document.querySelectorAll('main details table tr').length > 40")
        browser.resize(400, 800)
        for url in (address("steps"), address("step", step=3), diff):
            browser.open(url)
            assert browser.evaluate("document.documentElement.scrollWidth") <= 400, url
        browser.resize(1100, 1900)
    (file,) = [
        path
        for path in (min((root / "segments").glob("s*-*")) / "leaves" / "noise").rglob("c*")
        if path.is_file()
    ]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with serving(root) as address:
        # The middle of the leaf is in the damaged chunk.
        leaf = address("leaf", step=0, leaf="noise", box="150000:150004")
        check = address("check", step="", deep="1")
        browser.open(address("steps"))
        for url, expected in ((leaf, "Damaged"), (check, "finding")):
            browser.evaluate(f"location.hash = {json.dumps('#' + url.split('#')[1])}")
            browser.wait("document.querySelectorAll('main .problems').length === 1")
            page = browser.dom(errors=True)
            assert expected in page.text, page.text
        browser.picture(pictures / "damaged.png")


def main() -> int:
    """Run all checks.

    Returns:
        The exit status: 0 if all checks pass or Chromium is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="keep pictures of the page in this folder")
    arguments = parser.parse_args()
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        print(f"view-test skipped: it needs one of {', '.join(BROWSERS)}")
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = arguments.pictures or folder
        pictures.mkdir(parents=True, exist_ok=True)
        browser = Browser(program, folder)
        try:
            for check in (hostile, changes, golden):
                check(browser, folder, pictures)
                print(f"{check.__name__}: passed", flush=True)
        finally:
            browser.close()
        elsewhere = {
            url
            for url in browser.requests
            if urlsplit(url).scheme != "about"
            and urlsplit(url).hostname not in ("127.0.0.1", "rebound.example")
        }
        assert not elsewhere, elsewhere
        print(f"{len(browser.requests)} requests, all of them to this machine")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
