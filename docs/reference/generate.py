"""Write the Python API reference from the docstrings: ``python docs/reference/generate.py``.

The sources are parsed with griffe and never imported, so the page is the same with any set of
frameworks installed, and with none. ``--check`` writes nothing and fails if a public name lacks a
docstring, or if its docstring lacks a parameter, the return value or a parameter that exists.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import griffe

PAGE = Path(__file__).resolve().parent / "python.md"
SOURCES = PAGE.parents[2]

# The modules with public names, in the order of the page. Of a package: what its `__init__.py`
# exports; of a module: what it defines.
MODULES = (
    "deltacheck",
    "deltacheck.backends.torch",
    "deltacheck.backends.torch.trainer",
    "deltacheck.backends.torch.accelerate",
    "deltacheck.backends.torch.lightning",
    "deltacheck.backends.torch.megatron",
    "deltacheck.backends.torch.dcp.torchtitan",
    "deltacheck.backends.torch.deepspeed",
    "deltacheck.backends.torch.weight_transfer",
    "deltacheck.backends.orbax",
    "deltacheck.backends.orbax.v1",
    "deltacheck.evaluate",
    "deltacheck.errors",
)

HOW_TO = {
    "deltacheck.Follower": "publish.md",
    "deltacheck.KeepBest": "look-after-a-run.md",
    "deltacheck.MemoryTier": "every-step.md#memory-tier",
    "deltacheck.Mirror": "every-step.md#memory-tier",
    "deltacheck.ObjectStore": "object-stores.md",
    "deltacheck.Policy": "policies.md",
    "deltacheck.Profile": "policies.md#profile-a-run",
    "deltacheck.Profiler": "policies.md#profile-a-run",
    "deltacheck.Publisher": "publish.md",
    "deltacheck.Receiver": "publish.md",
    "deltacheck.StopSignals": "preemption.md",
    "deltacheck.finish_on_signal": "preemption.md",
    "deltacheck.follow": "publish.md",
    "deltacheck.backends.torch.DeltaStorageReader": "dcp.md",
    "deltacheck.backends.torch.DeltaStorageWriter": "dcp.md",
    "deltacheck.backends.torch.Engine": "pytorch.md",
    "deltacheck.backends.torch.Shard": "dcp.md",
    "deltacheck.backends.torch.apply": "publish.md",
    "deltacheck.backends.torch.load": "read.md#move-a-run-between-pytorch-and-jax",
    "deltacheck.backends.torch.save": "integrations.md",
    "deltacheck.backends.torch.trainer": "trainer.md",
    "deltacheck.backends.torch.accelerate": "integrations.md",
    "deltacheck.backends.torch.lightning": "integrations.md",
    "deltacheck.backends.torch.megatron": "frameworks.md#megatron-core",
    "deltacheck.backends.torch.dcp.torchtitan": "frameworks.md#torchtitan",
    "deltacheck.backends.torch.deepspeed": "frameworks.md#deepspeed",
    "deltacheck.backends.torch.weight_transfer": "publish.md",
    "deltacheck.backends.orbax": "orbax.md",
    "deltacheck.backends.orbax.applied": "publish.md",
    "deltacheck.backends.orbax.v1": "orbax.md",
    "deltacheck.backends.orbax.load": "read.md#move-a-run-between-pytorch-and-jax",
    "deltacheck.evaluate.TorchRun": "evaluate.md",
    "deltacheck.evaluate.Workload": "evaluate.md",
}

HEAD = """\
# Python API

`make docs` writes this page from the docstrings in the sources.
Every name on this page is public.
Every other name may change without notice.
`deltacheck` and `deltacheck.errors` need no framework.
Each other module needs the package that it is named after.
"""

_TITLES = {"parameters": "Args", "attributes": "Attributes", "returns": "Returns"}
_TITLES |= {"yields": "Yields", "raises": "Raises", "examples": "Examples"}
_SIGNATURE_COLUMNS = 100


@dataclass(frozen=True)
class Entry:
    """A public name: its dotted name on the page, and its definition."""

    name: str
    definition: griffe.Object

    @property
    def is_class(self) -> bool:
        """Return whether the name is a class."""
        return self.definition.is_class

    @property
    def documented_only(self) -> bool:
        """Return whether only a docstring is due: modules, properties and contract tests."""
        last = self.name.rpartition(".")[2]
        return not (self.is_class or self.definition.is_function) or last.startswith("test_")

    def parameters(self) -> list[griffe.Parameter]:
        """Return the parameters of a call, without ``self`` and ``cls``."""
        function = self.definition
        if self.is_class:
            if "__init__" not in function.all_members:
                return list(self._fields())
            function = function.all_members["__init__"]
            if function.is_alias:
                function = function.final_target
        if not isinstance(function, griffe.Function):
            return []
        names = {"self", "cls"}
        return [p for p in function.parameters if p.name not in names]

    def _fields(self) -> Iterator[griffe.Parameter]:
        """Yield the annotated attributes of a record whose base class makes the constructor."""
        for name, member in self.definition.all_members.items():
            attribute = member.final_target if member.is_alias else member
            is_field = attribute.is_attribute and "property" not in attribute.labels
            if is_field and attribute.annotation is not None and not name.startswith("_"):
                yield griffe.Parameter(
                    name,
                    annotation=attribute.annotation,
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=None if attribute.value is None else str(attribute.value),
                )

    def sections(self) -> list[griffe.DocstringSection]:
        """Return the parsed docstring; of a class, that of its ``__init__`` included."""
        parts = []
        for documented in (self.definition, self._constructor()):
            if documented is not None and documented.docstring is not None:
                parts += documented.docstring.parse(
                    "google", warnings=False, returns_named_value=False
                )
        return parts

    def _constructor(self) -> griffe.Object | None:
        return self.definition.members.get("__init__") if self.is_class else None


@dataclass
class Api:
    """The public names of some modules below a folder."""

    folder: Path = SOURCES
    modules: tuple[str, ...] = MODULES
    _loader: griffe.GriffeLoader = field(init=False)

    def __post_init__(self) -> None:
        """Parse the packages."""
        self._loader = griffe.GriffeLoader(search_paths=[self.folder], docstring_parser="google")
        for package in dict.fromkeys(module.split(".")[0] for module in self.modules):
            self._loader.load(package, try_relative_path=False)
        self._loader.resolve_aliases(implicit=True, external=False)

    def module(self, name: str) -> griffe.Module:
        """Return a parsed module."""
        return self._loader.modules_collection[name]

    def names(self, module: str) -> list[str]:
        """Return the public names of a module: its ``__all__``, else what it defines."""
        parsed = self.module(module)
        if parsed.exports:
            return sorted(map(str, parsed.exports), key=str.lower)
        kinds = (griffe.Kind.CLASS, griffe.Kind.FUNCTION)
        return [
            name
            for name, member in parsed.members.items()
            if not member.is_alias and member.kind in kinds and not name.startswith("_")
        ]

    def entries(self, module: str) -> Iterator[Entry]:
        """Yield the public names of a module, each class followed by its members.

        Raises:
            LookupError: If ``__all__`` has a name that the sources do not define.
        """
        for name in self.names(module):
            try:
                member = self.module(module).members[name]
                definition = member.final_target if member.is_alias else member
                if definition.is_module and name in definition.members:  # hidden by its content
                    definition = definition.members[name]
            except (KeyError, griffe.AliasResolutionError) as error:
                raise LookupError(f"{module}.{name} is exported, but not defined") from error
            yield Entry(f"{module}.{name}", definition)
            if definition.is_class:
                yield from self._members(f"{module}.{name}", definition)

    def _members(self, name: str, definition: griffe.Object) -> Iterator[Entry]:
        for member_name, member in definition.all_members.items():
            target = member.final_target if member.is_alias else member
            is_call = isinstance(target, griffe.Function)
            is_property = "property" in target.labels
            if member_name.startswith("_") or not (is_call or is_property):
                continue
            if is_call and any(d.value == "pytest.fixture" for d in target.decorators):
                continue
            yield Entry(f"{name}.{member_name}", self._documented(definition, target))

    @staticmethod
    def _documented(owner: griffe.Object, member: griffe.Object) -> griffe.Object:
        """Return the member, or the inherited one that it overrides if only that is documented."""
        if member.docstring is not None:
            return member
        for base in owner.mro():
            inherited = base.members.get(member.name)
            if inherited is not None and inherited.docstring is not None:
                return inherited
        return member


def signatures(api: Api) -> dict[str, str]:
    """Return every public name with its parameters, as ``name(a, /, b, *, c)``."""
    lines = {}
    for module in api.modules:
        for entry in api.entries(module):
            names = ", ".join(_arguments(entry.parameters(), names_only=True))
            is_call = entry.is_class or entry.definition.is_function
            lines[entry.name] = f"{entry.name}({names})" if is_call else entry.name
    return lines


def problems(api: Api) -> list[str]:
    """Return one line for each public name whose docstring is missing or incomplete."""
    lines = []
    for module in api.modules:
        if api.module(module).docstring is None:
            lines.append(f"{module} has no docstring")
        for entry in api.entries(module):
            lines += [f"{entry.name} {problem}" for problem in _problems_of(entry)]
    return lines


def _problems_of(entry: Entry) -> Iterator[str]:
    sections = entry.sections()
    if not sections:
        if not entry.name.rpartition(".")[2].startswith("test_"):
            yield "has no docstring"
        return
    if entry.documented_only:
        return
    documented = {
        item.name.lstrip("*")
        for section in sections
        if section.kind.value in ("parameters", "attributes")
        for item in section.value
    }
    names = [parameter.name for parameter in entry.parameters()]
    missing = [name for name in names if name not in documented]
    if missing:
        yield f"does not document {', '.join(missing)}"
    if not entry.is_class and (unknown := sorted(documented - set(names))):
        yield f"documents {', '.join(unknown)}, which it does not take"
    function = entry.definition
    returns = str(function.returns) if isinstance(function, griffe.Function) else "None"
    if returns not in ("None", "Self", "NoReturn") and not any(
        section.kind.value in ("returns", "yields") for section in sections
    ):
        yield "does not say what it returns"


def _markdown(entry: Entry) -> str:
    """Return a docstring as Markdown: text as it is, sections as lists."""
    parts = []
    for section in entry.sections():
        kind = section.kind.value
        if kind == "text":
            parts.append(str(section.value))
        elif kind == "admonition":
            parts.append(f"**{section.title}**\n\n{section.value.description}")
        elif kind in _TITLES:
            lines = [f"- {_label(kind, item)}{_folded(item.description)}" for item in section.value]
            parts.append(f"**{_TITLES[kind]}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _label(kind: str, item: griffe.DocstringElement) -> str:
    if kind in ("parameters", "attributes"):
        return f"`{item.name}`: "
    return f"`{item.annotation}`: " if kind == "raises" else ""


def _folded(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())


def _summary(entry: Entry) -> str:
    """Return the first sentence of a docstring, as a cell of a table."""
    docstring = entry.definition.docstring
    paragraph = docstring.value.strip().split("\n\n")[0] if docstring else ""
    match = re.match(r"(.*?\.)(?:\s|$)", paragraph, re.DOTALL)
    return " ".join((match[1] if match else paragraph).split()).replace("|", "\\|")


def _signature(entry: Entry) -> str:
    """Return a call as Python writes it, over several lines if it is long."""
    name = entry.name.removeprefix("deltacheck.")
    shown = name.rpartition(".")[2]
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if not entry.is_class and owner[:1].isupper():
        shown = f"{owner}.{shown}"
    definition = entry.definition
    if entry.is_class:
        bases = [str(base) for base in definition.bases]
        if any("Protocol" in base for base in bases):
            return f"class {shown}(Protocol)"
        if ".errors." in entry.name:
            return f"class {shown}({', '.join(bases)})"
    elif not isinstance(definition, griffe.Function):
        annotation = getattr(definition, "annotation", None)
        return f"{shown}: {annotation}" if annotation else shown
    returns = getattr(definition, "returns", None)
    end = f") -> {returns}" if returns and not entry.is_class else ")"
    arguments = list(_arguments(entry.parameters()))
    line = f"{shown}({', '.join(arguments)}{end}"
    if len(line) <= _SIGNATURE_COLUMNS:
        return line
    return f"{shown}(\n" + "".join(f"    {argument},\n" for argument in arguments) + end


def _arguments(parameters: list[griffe.Parameter], *, names_only: bool = False) -> Iterator[str]:
    """Yield parameters as they stand in a signature, with the marks ``/`` and ``*``."""
    kinds = griffe.ParameterKind
    previous: griffe.ParameterKind | None = None
    for parameter in parameters:
        kind = parameter.kind
        if previous is kinds.positional_only and kind is not kinds.positional_only:
            yield "/"
        if kind is kinds.keyword_only and previous not in (
            kinds.keyword_only,
            kinds.var_positional,
        ):
            yield "*"
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(kind, "")
        if names_only:
            yield stars + parameter.name
            previous = kind
            continue
        annotation = f": {parameter.annotation}" if parameter.annotation else ""
        default = ""
        if parameter.default is not None and not stars:
            default = f" = {parameter.default}" if annotation else f"={parameter.default}"
        yield f"{stars}{parameter.name}{annotation}{default}"
        previous = kind


class _Headings:
    """Headings, and the anchors that code hosts give them: repeated ones are numbered."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, marks: str, name: str) -> tuple[str, str]:
        """Return a heading and its anchor."""
        slug = re.sub(r"[^\w-]", "", name.lower())
        self._counts[slug] += 1
        number = self._counts[slug] - 1
        if not number:
            return f"{marks} `{name}`\n", f"#{slug}"
        # Named, because the site numbers repeated headings in another way.
        anchor = f"{slug}-{number}"
        return f'<a id="{anchor}"></a>\n\n{marks} `{name}`\n', f"#{anchor}"


def page(api: Api) -> str:
    """Return the text of the page."""
    headings = _Headings()
    return HEAD + "".join(_module(api, module, headings) for module in api.modules)


def _module(api: Api, module: str, headings: _Headings) -> str:
    docstring = api.module(module).docstring
    text = docstring.value.strip().split("\n\n")[0] if docstring else ""
    heading, _ = headings.add("##", module)
    table, parts = ["| name | purpose |", "|---|---|"], []
    for entry in api.entries(module):
        name = entry.name.removeprefix(f"{module}.")
        if "." not in name:
            title, anchor = headings.add("###", name)
            parts.append(title)
            table.append(f"| [`{name}`]({anchor}) | {_summary(entry)} |")
        elif name.rpartition(".")[2].startswith("test_"):  # the name of a contract test says it all
            parts.append(f"- asks that {name.rpartition('.test_')[2].replace('_', ' ')}")
            continue
        parts.append(
            f"```text\n{_signature(entry)}\n```\n\n{_markdown(entry)}{_how_to(entry.name)}\n"
        )
    return "\n".join(["\n" + heading, text + _how_to(module) + "\n", *table, "", *parts])


def _how_to(name: str) -> str:
    page = HOW_TO.get(name)
    return f"\n\n[How to](../how-to/{page})." if page else ""


def main() -> None:
    """Write the page, or check that it would be complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only check docstrings")
    check = parser.parse_args().check
    api = Api()
    if lines := problems(api):
        sys.exit("\n".join(lines))
    if not check:
        PAGE.write_text(page(api))


if __name__ == "__main__":
    main()
