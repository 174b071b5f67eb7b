"""Remember the chains that a check has read, so that later runs check the others."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import xxhash

from deltacheck.maintain.survey import Lineage, cost_bytes
from deltacheck.restore.export import new_file

_SAVE_SECONDS = 5.0  # between two writes of the file; a killed run repeats at most this much


def sample(lineages: list[Lineage], target_bytes: float, rng: random.Random) -> list[Lineage]:
    """Draw lineages at random until they have ``target_bytes``, and return them in their order."""
    numbers: set[int] = set()
    size = 0
    # Drawing without replacement: no chain is counted twice.
    for number in rng.sample(range(len(lineages)), len(lineages)):
        if size >= target_bytes:
            break
        numbers.add(number)
        size += cost_bytes(lineages[number])
    return [lineages[number] for number in sorted(numbers)]


def lineage_key(lineage: Lineage) -> str:
    """Return the key of a lineage in the progress file.

    Keys are unique across roots. The key of a chain changes when the chain grows, so it is read
    again then.
    """
    # Segment names have random nonces, so two roots do not share keys.
    text = "\0".join([lineage.path, *(segment.id for segment, _ in lineage.links)])
    return str(xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass")))


class ScrubProgress:
    """The keys of the lineages that were checked, in a file or only in memory.

    Args:
        path: File to keep them in. ``None``: they are forgotten at the end of the run.

    Raises:
        ValueError: If the file is not one of these.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.sound: set[str] = set()
        self.damaged: set[str] = set()
        self._last_save = time.monotonic()
        if path is not None and path.exists():
            try:
                # A device or a pipe has no end.
                if not path.is_file():
                    raise ValueError("it is not a regular file")
                content = json.loads(path.read_bytes())["deltacheck_scrub"]
                self.sound, self.damaged = (
                    set(map(str, content[name])) for name in ("done", "damaged")
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} is not the progress of a scrub: {type(error).__name__}: {error}. Name"
                    " another file"
                ) from None

    def record(self, key: str, is_whole: bool) -> None:
        """Record the result of a check. The file is written every few seconds."""
        # A chain whose files were replaced leaves the damaged ones, and one that decayed leaves the
        # sound ones.
        (self.damaged if is_whole else self.sound).discard(key)
        (self.sound if is_whole else self.damaged).add(key)
        if time.monotonic() - self._last_save > _SAVE_SECONDS:
            self.save()

    def restart(self) -> None:
        """Forget the whole lineages after all were checked, so that the next run reads them again.

        Damaged ones are kept: every run reports them.
        """
        self.sound.clear()
        self.save()

    def save(self) -> None:
        """Write the file, if there is one. It is replaced in one rename."""
        if self._path is None:
            return
        content = {"done": sorted(self.sound), "damaged": sorted(self.damaged)}
        with new_file(self._path, overwrite=True) as file:
            file.write(json.dumps({"deltacheck_scrub": content}).encode())
        self._last_save = time.monotonic()
