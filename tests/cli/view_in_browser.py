"""Show roots in headless Chromium and look at the page: `make view-test`.

Without Chromium, the check is skipped with one line. Debian's package is `chromium`.
"""

from __future__ import annotations

import argparse
import os
import re
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
from urllib.parse import urlencode

import numpy as np

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.cli.view.queries import Queries
from deltacheck.cli.view.server import ViewServer
from tests.support.forge import GOLDEN, unpack
from tests.support.hostile import NAMES, save_hostile

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Milliseconds of the page's own clock, which stands still while the page waits for the server.
BUDGET = 8000
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
            found == tag and attributes.items() <= values.items() for found, values in self.tags
        )


class Browser:
    """Headless Chromium with a profile of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        self._folder = folder
        self._command = [
            program,
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={folder / 'profile'}",
            f"--virtual-time-budget={BUDGET}",
            "--enable-logging=stderr",
            "--window-size=1100,2000",
            # No name leads anywhere but to this machine.
            "--host-resolver-rules=MAP * 127.0.0.1",
        ]
        # Chromium's sandbox needs a user that is not root.
        if os.geteuid() == 0:
            self._command.append("--no-sandbox")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, timeout=120, check=True
        )
        # Of the page itself, such as violations of its policy.
        errors = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        assert not errors, errors
        return done.stdout

    def dom(self, url: str) -> Dom:
        """Return the content of a page."""
        return Dom(self._run("--dump-dom", url))

    def picture(self, url: str, file: Path) -> np.ndarray:
        """Return a picture of a page, uint8 (height, width, channels), and keep it as a PNG."""
        from matplotlib.image import imread

        self._run(f"--screenshot={file}", url)
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


def golden(browser: Browser, folder: Path) -> None:
    """Show each view of each golden root."""
    for name in sorted(path.name.split(".")[0] for path in GOLDEN.glob("*.tar.xz")):
        root = unpack(name, folder / name)
        reader = deltacheck.open(root)
        steps = reader.steps()
        with serving(root) as address:
            page = browser.dom(address("steps"))
            assert page.count("main", **{"data-ready": "steps"}) == 1, name
            assert f"{len(steps)} step" in page.text, name
            assert page.count("svg", role="img") == 1, name
            step = browser.dom(address("step", step=steps[-1]))
            leaves = len(deltacheck.open(root).manifest().specs)
            assert re.search(r"[0-9]+ lea(f|ves)", step.text), (name, leaves)
            diff = browser.dom(address("diff", before=steps[0], after=steps[-1]))
            assert diff.count("main", **{"data-ready": "diff"}) == 1, name
            check = browser.dom(address("check", step="", deep="1"))
            assert "without a finding" in check.text, name
            for shown in (page, step, diff, check):
                assert shown.count("div", **{"class": "problems"}) == 0, (name, shown.text)


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
            # An address is also written by others.
            "address": address("leaf", step=1, leaf=NAMES[0], box=NAMES[1]),
            "constructor": address("constructor", step=NAMES[0]),
        }
        for name, url in addresses.items():
            page = browser.dom(url)
            # No element, attribute or script but those of the page.
            assert page.count("script") == 1, name
            assert page.count("img") == page.count("b") == 0, name
            assert page.count("h1") == 1, name
            for _, attributes in page.tags:
                assert not any(key.startswith("on") for key in attributes), name
                assert not (attributes.get("href") or "").startswith("javascript"), name
            assert "owned" not in (re.search(r"<title>.*", str(page.tags)) or [""])[0]
            for character in "\u202e\u2066\u2069\u2029\u200b\x1b":
                assert character not in page.text, (name, character)
        page = browser.dom(addresses["diff"])
        assert "<script>document.title='owned'</script>" in page.text
        assert "right\\u{202e}ot tfel" in page.text
        for name in ("steps", "step", "diff"):
            browser.picture(addresses[name], pictures / f"hostile-{name}.png")
        # A name of another site that leads to this address (DNS rebinding).
        rebound = addresses["steps"].replace("127.0.0.1", "rebound.example")
        page = browser.dom(rebound)
        assert "only 127.0.0.1 and localhost are served" in page.text
        assert page.count("main") == 0


def changes(browser: Browser, folder: Path, pictures: Path) -> None:
    """Look at the heat map of a block of changed elements, and at damage."""
    root = folder / "block"
    noise = np.random.default_rng(0).integers(0, 99, 300_000)
    with Engine(root) as engine:
        for step in range(4):
            weight = np.zeros((300, 500), np.float32)
            weight[BLOCK] = step
            state = {"layers": [{"w": weight, "b": np.ones(9)} for _ in range(3)], "noise": noise}
            engine.save(step, state | {"lr": 0.1 / (step + 1)}, metrics={"loss": 1.0}).wait()
            noise = noise + 1
    with serving(root) as address:
        picture = browser.picture(address("diff", before=0, after=3), pictures / "diff.png")
        # The colour of a cell that has changed altogether: of three leaves, and of the scale.
        dark = (np.abs(picture[..., :3].astype(int) - (8, 29, 88)) <= 2).all(axis=2)
        # A sixtieth of each map.
        assert dark.sum() > 3000, dark.sum()
        page = browser.dom(address("diff", before=0, after=3))
        assert "6000 of 150000 elements changed (4 %)" in page.text
        assert page.count("section", **{"data-drawn": ""}) == 4
        values = browser.dom(address("leaf", step=3, leaf="layers/0/w", box="29:32, 99:102"))
        assert values.count("td", **{"class": "number"}) == 3 * 4
        for name, url in {
            "steps": address("steps"),
            "step": address("step", step=3),
            "leaf": address("leaf", step=3, leaf="layers/0/w", box="28:36, 96:104"),
        }.items():
            browser.picture(url, pictures / f"{name}.png")
    (file,) = [
        path
        for path in (min((root / "segments").glob("s*-*")) / "leaves" / "noise").rglob("c*")
        if path.is_file()
    ]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with serving(root) as address:
        page = browser.dom(address("leaf", step=0, leaf="noise"))
        assert page.count("div", **{"class": "problems"}) == 1
        assert "Damaged" in page.text
        check = address("check", step="", deep="1")
        assert "finding" in browser.dom(check).text
        browser.picture(check, pictures / "damaged.png")


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
        for check in (hostile, changes):
            check(browser, folder, pictures)
            print(f"{check.__name__}: passed")
        golden(browser, folder)
        print("golden: passed")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
