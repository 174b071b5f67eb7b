"""Write drawings to one HTML page without network and script, or to images."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

from deltacheck.report.drawing import Drawing, Tip
from deltacheck.report.formatting import escape_unprintable
from deltacheck.restore.export import named_writes, new_file

_DPI = 150  # of images
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #222; --soft: #555; --line: #ddd;
  --link: #0072B2; --warning: #fdf3ec; }
@media (prefers-color-scheme: dark) { :root { --page: #17191d; --ink: #e4e4e4; --soft: #aaa;
  --line: #444; --link: #6cb8e6; --warning: #3a2a20; } }
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem 1rem 4rem; background: var(--page);
  color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .4rem; }
p { margin: .3rem 0 .8rem; max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--link); }
nav a { margin-right: 1.1rem; white-space: nowrap; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem;
  margin: 1.2rem 0; }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; }
dt { font-size: .8rem; color: var(--soft); }
dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .92rem; max-width: 85ch;
  margin-bottom: .6rem; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; }
svg .tip rect { fill: #000; fill-opacity: 0; } svg .tip:hover rect { fill-opacity: .08; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--link); }
table { border-collapse: collapse; font-size: .82rem;
  font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { border-bottom: 2px solid #999; background: var(--page); position: sticky; top: 0; }
.word { text-align: left; }
.problems { border-left: 4px solid #D55E00; padding: .4rem 1rem; background: var(--warning); }
@media print { details > *:not(summary) { display: none; } nav { display: none; } }
"""
# SVG inside HTML needs no namespaces, and no identifier that nothing refers to. Without them the
# page is smaller.
_NAMESPACE = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')
_ID = re.compile(r'\sid="([^"]*)"')
_REFERENCE = re.compile(r"#([\w-]+)")


def page(
    title: str,
    facts: Mapping[str, str],
    problems: Sequence[str],
    drawings: Sequence[Drawing],
    alert: str = "Not everything could be read:",
    conclusion: Sequence[str] = (),
) -> str:
    """Return a page.

    Args:
        title: Title of the page.
        facts: Facts at its head, name -> value.
        problems: Problems at its head.
        drawings: The figures and their tables.
        alert: Text above the problems.
        conclusion: Sentences below the title, a paragraph each.

    Returns:
        The HTML document.
    """
    links = "".join(f'<a href="#{_text(d.name)}">{_text(d.title)}</a> ' for d in drawings)
    head = "".join(
        f"<div><dt>{_text(word)}</dt><dd>{_text(value)}</dd></div>" for word, value in facts.items()
    )
    lead = "".join(f"<p>{_text(sentence)}</p>\n" for sentence in conclusion)
    wrong = "".join(f"<li>{_text(problem)}</li>" for problem in problems)
    warning = (
        f'<div class="problems" role="alert"><p>{_text(alert)}</p><ul>{wrong}</ul></div>'
        if wrong
        else ""
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{_text(title)}</h1>\n{lead}"
        "<nav"
        f' aria-label="Figures">{links}</nav>\n<dl>{head}</dl>\n{warning}\n'
        f"{''.join(map(_section, drawings))}</main>\n</body>\n</html>\n"
    )


def write_page(file: Path, text: str) -> None:
    """Write a page. A reader of ``file`` sees the old page or the new one, never a part."""
    with new_file(file, overwrite=True) as new:
        new.write(text.encode())


def write_images(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Write each figure as a PNG image to a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{drawing.name}.png" for drawing in drawings]
    for drawing, file in zip(drawings, files, strict=True):
        with named_writes(file):
            _save(drawing, file, format="png", dpi=_DPI)
    return files


def _text(text: str) -> str:
    # Leaf paths come from the disk and may contain markup or control characters.
    return escape(escape_unprintable(text))


def _save(drawing: Drawing, target: Path | io.StringIO, **options: Any) -> None:
    with warnings.catch_warnings():
        # The path of a leaf may use a script that the font of the images lacks. The page is not
        # affected, because it uses the reader's fonts.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        drawing.figure.savefig(target, **options)


def _section(drawing: Drawing) -> str:
    name, title = _text(drawing.name), _text(drawing.title)
    return (
        "<section"
        f' id="{name}">\n<h2>{title}</h2>\n<figure>\n'
        f"<figcaption>{_text(drawing.caption)}</figcaption>\n<div"
        f' class="scroll">{_svg(drawing)}</div>\n</figure>\n{_table(drawing)}\n</section>\n'
    )


def _table(drawing: Drawing) -> str:
    def cells(row: Sequence[str], tag: str, attributes: str = "") -> str:
        elements = []
        for number, cell in enumerate(row):
            kind = ' class="word"' if number < drawing.words else ""
            elements.append(f"<{tag}{attributes}{kind}>{_text(cell)}</{tag}>")
        return f"<tr>{''.join(elements)}</tr>"

    head = cells(drawing.columns, "th", ' scope="col"')
    body = "\n".join(cells(row, "td") for row in drawing.rows)
    return (
        '<details><summary>The same as a table</summary>\n<div class="scroll"><table'
        f' id="{_text(drawing.name)}-table">\n'
        f"<thead>{head}</thead>\n<tbody>{body}</tbody>\n</table></div></details>"
    )


def _svg(drawing: Drawing) -> str:
    """Return the figure as an SVG element. Text stays text, and the browser shows the tips."""
    content = io.StringIO()
    # Identifiers must differ between the figures of a page. The salt also makes them reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        _save(
            drawing,
            content,
            format="svg",
            # Without a date and a version, equal data gives equal figures.
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    text = content.getvalue()
    begin = text.index("<svg")
    opening, body = (
        text[begin : text.index(">", begin)],
        text[text.index(">", begin) + 1 : text.rindex("</svg>")],
    )
    size = re.search(r'viewBox="([^"]*)"', opening)
    assert size is not None
    width, height = (float(number) for number in size.group(1).split()[2:])
    referenced = set(_REFERENCE.findall(body))
    body = _NAMESPACE.sub("", body)
    body = _ID.sub(lambda match: match.group(0) if match.group(1) in referenced else "", body)
    tips = "".join(_tip(tip, drawing, width, height) for tip in drawing.tips)
    title = _text(drawing.title)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img"'
        f' aria-label="{title}">{body}{tips}</svg>'
    )


def _tip(tip: Tip, drawing: Drawing, width: float, height: float) -> str:
    x_min, y_min, x_max, y_max = tip.box
    pixels = (
        tip.axes.transData.transform([(x_min, y_min), (x_max, y_max)])
        / drawing.figure.bbox.size
        * (width, height)
    )
    panel = tip.axes.bbox.get_points() / drawing.figure.bbox.size * (width, height)
    # A tip must not reach beyond its panel, where it would cover the labels or another panel.
    (x0, y0), (x1, y1) = pixels.clip(panel[0], panel[1])
    x, y, w, h = min(x0, x1), height - max(y0, y1), abs(x1 - x0), abs(y1 - y0)
    return (
        f'<g class="tip"><title>{_text(tip.text)}</title><rect x="{x:.1f}" y="{y:.1f}"'
        f' width="{w:.1f}" height="{h:.1f}"/></g>'
    )
