"""The results of the kit: a JSON document for each part, and one page for all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import format_cell
from tests.gpu_kit import goals

TITLES = {
    1: "Checks of the device and the engine",
    2: "compute-sanitizer",
    3: "Saves in PyTorch",
    4: "Saves in JAX",
    5: "Post-training, killed and resumed",
    6: "A device that others use, too",
    7: "Profile of the kernels",
    8: "Kernels",
    9: "Other ways of saving, and larger states",
}


def write(out: Path, document: Mapping[str, Any]) -> None:
    """Write the document of a part, the goals, and the page of all parts so far."""
    _replace(out / f"part-{document['part']}.json", json.dumps(document, indent=1) + "\n")
    documents = [json.loads(file.read_text()) for file in sorted(out.glob("part-?.json"))]
    _replace(out / "goals.md", "\n".join(goals.table(documents)) + "\n")
    _replace(out / "results.md", "\n".join(_page(documents)) + "\n")


def line(part: int, record: Mapping[str, Any]) -> str:
    """Return the line that is printed for a step."""
    reason = f": {record['reason']}" if record.get("reason") else ""
    return f"part {part}  {record['title']}  {record['status']}{reason} ({record['seconds']:.1f} s)"


def _page(documents: list[dict[str, Any]]) -> Iterator[str]:
    described = documents[0]["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    yield "# Results of the GPU kit\n"
    yield f"{described['date']}; {described['processor']}, {described['cores']} cores; {versions}\n"
    if any(document["rehearsal"] for document in documents):
        yield "**A rehearsal without a GPU: the figures have no meaning.**\n"
    yield from goals.table(documents)
    yield ""
    for document in documents:
        yield f"## Part {document['part']}: {TITLES[document['part']]}\n"
        yield "| step | result | seconds |\n|---|---|---|"
        for record in document["steps"]:
            reason = f": {record['reason']}" if record.get("reason") else ""
            cells = (record["title"], f"{record['status']}{reason}", f"{record['seconds']:.1f}")
            yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        yield ""
        for record in document["steps"]:
            if "result" in record:
                yield from _result(record["result"])


def _result(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {result['name']}\n\n{result['about']}\n"
    for table in result["tables"]:
        units = table["units"]
        yield f"{table['title']}:\n"
        yield f"| {' | '.join(units)} |\n|{'---|' * len(units)}"
        for row in table["rows"]:
            yield f"| {' | '.join(format_cell(row[name], units[name]) for name in units)} |"
        yield ""
    for figure in result["figures"]:
        verdict = "holds" if figure["holds"] else "**missed**"
        bound = "at least" if figure["at_least"] else "at most"
        value, limit = (format_cell(figure[name], figure["unit"]) for name in ("value", "limit"))
        yield f"- {figure['name']}: {value} ({bound} {limit}: {verdict})"
    yield ""


def _replace(file: Path, text: str) -> None:
    """Write a file so that a killed part leaves the one before."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)
