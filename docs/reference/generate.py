"""Write ``python.md`` from the signatures and docstrings of every public name: ``python
docs/reference/generate.py [--check]``.

The sources are parsed and never imported, so the page is the same with any set of frameworks
installed, and with none. A public name or method without a docstring is an error that names it.
``--check`` writes nothing and fails where the page is not what would be written.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "python.md"
SOURCES = PAGE.parent.parent.parent

# Where public names are, in the order of the page. Of a package: what its `__init__.py` re-exports;
# of a module: what it defines.
MODULES = (
    "deltacheck",
    "deltacheck.backends.torch",
    "deltacheck.backends.torch.trainer",
    "deltacheck.backends.torch.accelerate",
    "deltacheck.backends.torch.lightning",
    "deltacheck.backends.torch.megatron",
    "deltacheck.backends.torch.deepspeed",
    "deltacheck.backends.torch.datastates",
    "deltacheck.backends.orbax",
    "deltacheck.evaluate",
    "deltacheck.errors",
    "deltacheck.testing.codec",
    "deltacheck.testing.place",
    "deltacheck.testing.ranks",
)

HOW_TO = {
    "deltacheck.Follower": "follow.md",
    "deltacheck.KeepBest": "look-after-a-run.md",
    "deltacheck.MemoryTier": "memory-tier.md",
    "deltacheck.Mirror": "memory-tier.md",
    "deltacheck.ObjectStore": "object-stores.md",
    "deltacheck.Policy": "policies.md",
    "deltacheck.Profile": "profile.md",
    "deltacheck.Profiler": "profile.md",
    "deltacheck.finish_on_signal": "preemption.md",
    "deltacheck.follow": "follow.md",
    "deltacheck.backends.torch.DeltaStorageReader": "dcp.md",
    "deltacheck.backends.torch.DeltaStorageWriter": "dcp.md",
    "deltacheck.backends.torch.Engine": "pytorch.md",
    "deltacheck.backends.torch.GradientLog": "gradient-log.md",
    "deltacheck.backends.torch.Shard": "dcp.md",
    "deltacheck.backends.torch.apply": "follow.md",
    "deltacheck.backends.torch.files.load": "cross-framework.md",
    "deltacheck.backends.torch.save": "integrations.md",
    "deltacheck.backends.torch.trainer": "integrations.md",
    "deltacheck.backends.torch.accelerate": "integrations.md",
    "deltacheck.backends.torch.lightning": "integrations.md",
    "deltacheck.backends.torch.megatron": "dcp.md",
    "deltacheck.backends.torch.deepspeed": "deepspeed.md",
    "deltacheck.backends.torch.datastates": "integrations.md",
    "deltacheck.backends.orbax": "orbax.md",
    "deltacheck.backends.orbax.GradientLog": "gradient-log.md",
    "deltacheck.backends.orbax.applied": "follow.md",
    "deltacheck.backends.orbax.state.load": "cross-framework.md",
    "deltacheck.evaluate.Workload": "evaluate.md",
    "deltacheck.testing.codec": "write-a-backend.md",
}

HEAD = """\
# Python API

Written by `make docs` from the docstrings in the sources: change those, not this page. Public is what stands here; everything else may change.
`deltacheck` and `deltacheck.errors` need no framework; `deltacheck.testing` needs pytest; the others need the package that they are named after.
"""

_WIDTH = 110  # of a signature on one line
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Undocumented(Exception):
    """Public names without a docstring, one a line."""


@dataclass(frozen=True)
class Found:
    """A definition, and the module that holds it."""

    module: str
    node: ast.ClassDef | Function


class Sources:
    """The modules below a folder, parsed once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[str, ast.Module] = {}

    def file(self, module: str) -> Path:
        """The source of a module. Raises ``FileNotFoundError`` where there is none."""
        path = self._folder.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def parsed(self, module: str) -> ast.Module:
        if module not in self._parsed:
            self._parsed[module] = ast.parse(self.file(module).read_text())
        return self._parsed[module]

    def find(self, module: str, name: str) -> Found | None:
        """Where a name of a module is defined, through every re-export; ``None`` for what is no
        class or function of ours.
        """
        found = self._defined(module, name)
        return found if isinstance(found, Found) else None

    def shown(self, module: str, default: ast.expr) -> str:
        """A default value as the reader needs it: a constant of ours by its value."""
        found = self._defined(module, default.id) if isinstance(default, ast.Name) else None
        return ast.unparse(found if isinstance(found, ast.Constant) else default)

    def _defined(self, module: str, name: str) -> Found | ast.expr | None:
        imports: dict[str, tuple[str, str]] = {}
        for node in _statements(self.parsed(module).body):
            if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return node.value
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == module.split(".")[0]
            ):
                imports |= {
                    alias.asname or alias.name: (node.module or "", alias.name)
                    for alias in node.names
                }
        return self._defined(*imports[name]) if name in imports else None

    def public(self, module: str) -> list[str]:
        """The names in ``__all__``; without one, the classes and functions that the module defines,
        but for ``_`` names.
        """
        body = self.parsed(module).body
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return sorted(ast.literal_eval(node.value), key=str.lower)
        return [
            n.name
            for n in body
            if isinstance(n, (ast.ClassDef, *_FUNCTIONS)) and not n.name.startswith("_")
        ]

    def bases(self, found: Found) -> Iterator[Found]:
        """The class itself, then its base classes as far as they are ours."""
        yield found
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            parent = self.find(found.module, name.id) if isinstance(name, ast.Name) else None
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                yield from self.bases(parent)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those under `if TYPE_CHECKING` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)


def _doc(node: ast.Module | ast.ClassDef | Function) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def _summary(doc: str) -> str:
    """The first sentence, as a cell of a table."""
    found = re.match(r"(.*?\.)(?:\s|$)", doc.split("\n\n")[0], re.DOTALL)
    return " ".join((found[1] if found else doc.split("\n\n")[0]).split()).replace("|", "\\|")


def _arguments(
    function: Function, shown_default: Callable[[ast.expr], str], *, bound: bool
) -> list[str]:
    """The arguments as they are written, without `self`."""
    given = function.args

    def shown_as(one: ast.arg, default: ast.expr | None) -> str:
        annotation = f": {ast.unparse(one.annotation).strip(chr(39))}" if one.annotation else ""
        if default is None:
            return one.arg + annotation
        return f"{one.arg}{annotation}{' = ' if annotation else '='}{shown_default(default)}"

    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(
        given.defaults
    )
    shown = [shown_as(one, default) for one, default in zip(plain, defaults, strict=True)]
    if given.posonlyargs:
        shown.insert(len(given.posonlyargs), "/")
    if bound:
        shown = shown[1:]
    if given.vararg:
        shown.append("*" + shown_as(given.vararg, None))
    elif given.kwonlyargs:
        shown.append("*")
    shown += [
        shown_as(one, default)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return [*shown, "**" + shown_as(given.kwarg, None)] if given.kwarg else shown


def _signature(name: str, arguments: list[str], returns: ast.expr | None = None) -> str:
    end = f") -> {ast.unparse(returns).strip(chr(39))}" if returns else ")"
    line = f"{name}({', '.join(arguments)}{end}"
    return (
        line
        if len(line) <= _WIDTH
        else f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + end
    )


def _decorators(node: ast.ClassDef | Function) -> set[str]:
    return {ast.unparse(one).split("(")[0].split(".")[-1] for one in node.decorator_list}


def _fields(node: ast.ClassDef) -> list[str]:
    """The public fields of a record, as arguments."""
    found = []
    for item in node.body:
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not item.target.id.startswith("_")
        ):
            annotation = ast.unparse(item.annotation)
            if not annotation.startswith(("ClassVar", "InitVar")):
                default = (
                    f" = {ast.unparse(item.value)}"
                    if item.value and "field(" not in ast.unparse(item.value)
                    else ""
                )
                found.append(f"{item.target.id}: {annotation}{default}")
    return found


class _Page:
    """The page while it is written, and what is missing from it."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.missing: list[str] = []
        self._headings: Counter[str] = Counter()

    def heading(self, marks: str, name: str) -> tuple[str, str]:
        """A heading, and the link to it as code hosts make it: letters and digits, a number where
        it is there already.
        """
        slug = re.sub(r"[^\w-]", "", name.lower())
        self._headings[slug] += 1
        repeated = self._headings[slug] - 1
        return f"{marks} `{name}`\n", f"#{slug}-{repeated}" if repeated else f"#{slug}"

    def module(self, module: str) -> str:
        sources = self.sources
        doc = _doc(sources.parsed(module)) or self._missing(module)
        lines = [
            "\n" + self.heading("##", module)[0],
            doc.split("\n\n")[0] + _how_to(module) + "\n",
        ]
        table, entries = ["| name | what it is |", "|---|---|"], []
        for name in sources.public(module):
            where, found = f"{module}.{name}", sources.find(module, name)
            if found is not None:
                doc = _doc(found.node) or self._missing(where)
                heading, link = self.heading("###", name)
                entries += [heading, self.entry(where, name, found, doc)]
                table.append(f"| [`{name}`]({link}) | {_summary(doc)} |")
            elif sources.file(where).is_file():
                table.append(
                    f"| `{name}` |"
                    f" {_summary(_doc(sources.parsed(where)) or self._missing(where))} |"
                )
            else:
                self.missing.append(f"{where} (which is no class, function or module)")
        return "\n".join([*lines, *table, "", *entries])

    def entry(self, where: str, name: str, found: Found, doc: str) -> str:
        if isinstance(found.node, ast.ClassDef):
            return self.klass(where, name, found, doc)
        shown = _signature(
            name, self.arguments(found.module, found.node, bound=False), found.node.returns
        )
        return f"{_block(shown)}\n{doc}{_how_to(where)}\n"

    def klass(self, where: str, name: str, found: Found, doc: str) -> str:
        members: dict[str, tuple[str, Function]] = {}
        docs: dict[str, str] = {}
        arguments: list[str] | None = None
        fields: list[str] = []
        assert isinstance(found.node, ast.ClassDef)
        for each in self.sources.bases(found):
            assert isinstance(each.node, ast.ClassDef)
            for item in each.node.body:
                if not isinstance(item, _FUNCTIONS) or "overload" in _decorators(item):
                    continue
                if item.name == "__init__" and arguments is None:
                    arguments = self.arguments(each.module, item, bound=True)
                    doc += f"\n\n{_doc(item)}" if _doc(item) else ""
                elif not item.name.startswith("_") and not {"setter", "deleter"} & _decorators(
                    item
                ):
                    members.setdefault(item.name, (each.module, item))
                    docs[item.name] = docs.get(item.name) or _doc(item)
            fields = _fields(each.node) + fields
        parents = [ast.unparse(base) for base in found.node.bases]
        if found.module == "deltacheck.errors" and parents:
            shown = f"class {name}({', '.join(parents)})"
        elif "Protocol" in " ".join(parents):
            shown = f"class {name}(Protocol)"
        else:
            shown = _signature(name, fields if arguments is None else arguments)
        lines = [f"{_block(shown)}\n{doc}{_how_to(where)}\n"]
        asked = [member for member in members if member.startswith("test_")]
        for member, (module, function) in members.items():
            if member not in asked and "fixture" not in _decorators(function):
                lines.append(self.member(where, name, module, function, docs[member]))
        if asked:  # the name of a test is its sentence
            lines.append(
                "It asks that:\n\n"
                + "\n".join(f"- {one[5:].replace('_', ' ')}" for one in asked)
                + "\n"
            )
        return "\n".join(lines)

    def member(self, where: str, name: str, module: str, function: Function, doc: str) -> str:
        doc = doc or self._missing(f"{where}.{function.name}")
        decorators = _decorators(function)
        if {"property", "cached_property"} & decorators:
            shown = f"{name}.{function.name}" + (
                f": {ast.unparse(function.returns)}" if function.returns else ""
            )
        else:
            arguments = self.arguments(module, function, bound="staticmethod" not in decorators)
            shown = _signature(f"{name}.{function.name}", arguments, function.returns)
        return f"{_block(shown)}\n{doc}\n"

    def arguments(self, module: str, function: Function, *, bound: bool) -> list[str]:
        return _arguments(function, partial(self.sources.shown, module), bound=bound)

    def _missing(self, what: str) -> str:
        self.missing.append(what)
        return ""


def _block(code: str) -> str:
    return f"```text\n{code}\n```\n"


def _how_to(name: str) -> str:
    page = HOW_TO.get(name)
    return f"\n\n[How to](../how-to/{page})." if page else ""


def page(folder: Path = SOURCES, modules: tuple[str, ...] = MODULES) -> str:
    """The page's text. Raises ``Undocumented`` naming every public name, method and property
    without a docstring.
    """
    made = _Page(Sources(folder))
    text = HEAD + "".join(made.module(module) for module in modules)
    if made.missing:
        raise Undocumented("\n".join(f"{name} has no docstring" for name in made.missing))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where the page is not what would be written",
    )
    check = parser.parse_args().check
    try:
        text = page()
    except Undocumented as error:
        sys.exit(str(error))
    if not check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.name} is not what the docstrings say: run `make docs` and commit the page")


if __name__ == "__main__":
    main()
