"""Azurite, Microsoft's emulator of Azure Blob Storage, on a free port of the loopback.

It is no Python package: ``npm install azurite``, with ``azurite-blob`` on the ``PATH``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import urllib.request
from email.utils import formatdate

PROGRAM = "azurite-blob"
_ACCOUNT = "devstoreaccount1"
# The one key of every Azurite, which its documentation has.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_OPTIONS = ("--blobPort", "0", "--inMemoryPersistence", "--silent", "--skipApiVersionCheck")
# Its standard input ends with the parent process, however that ends.
_UNTIL_INPUT_ENDS = '"$@" & server=$!; cat > /dev/null; kill $server; wait $server'


def is_installed() -> bool:
    """Return whether there is an emulator to start."""
    return shutil.which(PROGRAM) is not None


class Azurite:
    """A running emulator, with its data in memory."""

    def __init__(self) -> None:
        words = ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", PROGRAM, *_OPTIONS, "--disableTelemetry"]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        listens = next(line for line in self._process.stdout if "successfully listens on" in line)
        self.endpoint = f"{listens.split()[-1]}/{_ACCOUNT}"

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
        self._process.stdout.close()
        self._process.wait(timeout=240)
