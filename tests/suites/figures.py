"""Measure the structure and the language of the ``deltacheck`` package.

Usage: ``python -m tests.suites.figures [CHECKOUT] [--public FILE] [--list NAME]``

Without ``--list`` this prints a Markdown table with one row per figure: name, description, value
and goal. With ``--list NAME`` it prints the places behind a figure, one ``file:line: text`` per
line. The sources are parsed and never imported, so neither the package nor a framework needs to be
installed. Only the standard library is used.

Definitions that several figures share:

* A *unit* is a top-level entry of ``deltacheck/``: a module, a package or a stub (``.pyi``).
* The *facade* is ``deltacheck/__init__.py``. It is no unit and its imports are not counted. A name
  imported from the facade counts as an import of the module that defines it.
* An import counts wherever it stands, also inside a function ("lazy"), unless it is under
  ``if TYPE_CHECKING``. ``import_module("deltacheck.x")`` counts if the name is a literal.
  Names that are assembled at run time are not seen.
* A name is *public* if ``tests/docs/public_names.txt`` or an ``__all__`` of a facade lists it. The
  public methods of a public class are public, inherited ones included.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

PACKAGE = "deltacheck"
PUBLIC_NAMES = "tests/docs/public_names.txt"
FACADES = (PACKAGE, f"{PACKAGE}.backends.torch", f"{PACKAGE}.backends.orbax")
TORCH, ORBAX = f"{PACKAGE}/backends/torch/", f"{PACKAGE}/backends/orbax/"

PYTHON_FOLDERS = (PACKAGE, "tests", "benchmarks", "examples", "docs")
DOCSTRING_FOLDERS = (PACKAGE, "tests", "benchmarks", "examples")
CPP_FOLDERS = ("xla_ffi", "tests")
CPP_SUFFIXES = (".h", ".cc", ".cu", ".cuh", ".c")

MAX_COLUMNS = 100
MAX_CLASS_LINES = 300
MAX_ATTRIBUTES = 15
MAX_PARAMETERS = 8
MAX_FUNCTION_LINES = 50
MAX_COMPLEXITY = 15

# A name made of one of these words alone does not say what it holds. Leading and trailing
# underscores are ignored, and so is `other` as a parameter of a method such as `__eq__`.
# Left out on purpose:
# - terms of the field: `cast`, `part`, `now`, `out`, `first`, `last`, `next`, `encoded`;
# - words that JSON documents or schemas fix as field names: `before`, `after`, `changed`,
#   `derived`, `every`, `measured`, `missing`, `removed`;
# - words that NumPy, Orbax and zarr-python use as names: `all`, `like`, `off`, `joined`, `loaded`,
#   `opened`, `restored`, `resumed`, `saved`, `used`.
# Measured with this set, zarr-python has 0.1 %, Orbax 0.1 % and accelerate 0.0 %.
FUNCTION_WORDS = frozenset(
    # Pronouns, determiners and question words.
    "another any both each he her him his how it its mine most more none nothing of one ones "
    "other others ours own same she some such that their theirs them these they this those us we "
    "what when where whether which who whole whose why you "
    # Prepositions, conjunctions and adverbs.
    "about above again ago ahead alike alone along already also and apart around as at away "
    "back behind below beside between but by else even ever for from here if in inside into "
    "just later near never not on once only or otherwise over rather since so still than "
    "then there therefore though through to together too under unless until up upon very while "
    "with within without yet "
    # Participles and past tenses without a noun.
    "added adopted asked became become began begun brought called came chosen described done drawn "
    "dropped ended felt filled found gave given gone got had heard held hung kept knew known "
    "left listed looked made meant met moved named needed picked placed planned put "
    "raised ran reached refused said seen sent settled shown spent spoiled "
    "started stood stored taken thought told took touched tried waited wanted watched went "
    "woken written "
    # Theatre and conversation.
    "act acts ask asks hear hears play plays say says tell tells".split()
)

RELATIVE_CLAUSE = re.compile(r"\s*(What|Which|Whether|Where|How|Who|When|Why|That)\b")
_RULER = re.compile(r"[-=*#~/_\s]*$|[-=*#~]{3,}")
_LICENSE = re.compile(r"SPDX-License|Copyright|Licensed under", re.IGNORECASE)
_PYTHON_DIRECTIVE = re.compile(r"(type:|noqa|pragma|fmt:|ruff:|mypy:|pyright:|!|-\*-)")
# Comments that only repeat what a tool or a closing brace needs.
_CPP_DIRECTIVE = re.compile(r"(clang-format|NOLINT|IWYU|namespace\b|[A-Z0-9_]+_H_?$)")

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = ast.ClassDef | FunctionNode
Graph: TypeAlias = Mapping[str, set[str]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)


@dataclass(frozen=True, order=True)
class Place:
    """A line of a source file, and what is to be said about it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        name: The short name that ``--list`` takes.
        title: What is measured, in a few words.
        value: The value as it is printed.
        goal: The goal as it is printed, ``"-"`` if there is none.
        places: The lines behind the value, in the order in which ``--list`` prints them.
    """

    name: str
    title: str
    value: str
    goal: str = "-"
    places: Sequence[Place] = ()


@dataclass(frozen=True)
class Import:
    """An import of one module of the package by another.

    Attributes:
        source: Dotted name of the importing module.
        target: Dotted name of the imported module.
        lazy: Whether the import stands inside a function.
        place: The import statement.
    """

    source: str
    target: str
    lazy: bool
    place: Place


@dataclass(frozen=True)
class Function:
    """A function or method. ``owner`` is the class that it is defined in directly, if any."""

    module: Module
    qualified_name: str
    node: FunctionNode
    owner: ast.ClassDef | None

    @property
    def place(self) -> Place:
        """Return the place of the ``def`` line, with the qualified name as its text."""
        return self.module.place(self.node, f"{self.module.name}.{self.qualified_name}")

    @property
    def parameters(self) -> list[str]:
        """Return the parameter names without ``self``, ``cls``, ``*args`` and ``**kwargs``."""
        arguments = self.node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        is_bound = self.owner is not None and "staticmethod" not in decorators(self.node)
        return names[is_bound:] + [argument.arg for argument in arguments.kwonlyargs]

    @property
    def length(self) -> int:
        """Return the number of lines from ``def`` to the end, docstring included."""
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def length_of_code(self) -> int:
        """Return the number of lines without those of the docstring."""
        docstring = docstring_of(self.node)
        return self.length - (0 if docstring is None else docstring.count("\n") + 1)

    @property
    def complexity(self) -> int:
        """Return one more than the number of branches, loops and operands of ``and`` and ``or``.

        Source: McCabe, A Complexity Measure, 1976, with the operands of conditions.
        """
        nodes = list(ast.walk(self.node))
        operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
        return 1 + operands + sum(isinstance(node, _BRANCHES) for node in nodes)


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed Python file. ``path`` is relative to the checkout, with forward slashes."""

    name: str
    path: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self.source, self.path)

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines without their ends."""
        return self.source.splitlines()

    @cached_property
    def functions(self) -> list[Function]:
        """Return every function of the module, methods and nested functions included."""
        return [Function(self, name, node, owner) for name, node, owner in _walk(self.tree)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Return every class of the module, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    def place(self, node: ast.stmt | ast.expr | ast.arg, text: str = "") -> Place:
        """Return the place of a node, by default with its first source line as the text."""
        return Place(self.path, node.lineno, text or self.lines[node.lineno - 1].strip())


def _walk(
    parent: ast.AST, prefix: str = "", owner: ast.ClassDef | None = None
) -> Iterator[tuple[str, FunctionNode, ast.ClassDef | None]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _FUNCTIONS):
            yield prefix + node.name, node, owner
            yield from _walk(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _walk(node, f"{prefix}{node.name}.", node)
        else:
            yield from _walk(node, prefix, owner)


def decorators(node: Definition) -> set[str]:
    """Return the last components of the decorators' names, without arguments."""
    return {ast.unparse(entry).split("(")[0].rpartition(".")[2] for entry in node.decorator_list}


def docstring_of(node: ast.Module | Definition) -> str | None:
    """Return the docstring of a node as written, or ``None``."""
    return ast.get_docstring(node, clean=False)


@dataclass
class Package:
    """The modules of the package in a checkout, and the imports between them."""

    root: Path
    modules: dict[str, Module] = field(default_factory=dict)
    stubs: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, root: Path) -> Package:
        """Read every module below ``root / "deltacheck"``."""
        package = cls(root)
        for path in source_files(root, [PACKAGE], (".py", ".pyi")):
            relative = path.relative_to(root)
            parts = relative.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            if path.suffix == ".pyi":
                package.stubs.add(name)
            else:
                text = path.read_text(encoding="utf-8")
                package.modules[name] = Module(name, relative.as_posix(), text, is_package)
        return package

    @cached_property
    def imports(self) -> list[Import]:
        """Return every import between two modules outside the facade."""
        found: list[Import] = []
        for module in self.modules.values():
            if module.name != PACKAGE:
                visitor = _ImportVisitor(self, module)
                visitor.visit(module.tree)
                found += visitor.imports
        return [edge for edge in found if edge.source != edge.target and edge.target != PACKAGE]

    def find_module(self, dotted: str) -> str | None:
        """Return the longest prefix of a dotted name that is a module or a stub."""
        parts = dotted.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((name for name in prefixes if name in self.modules or name in self.stubs), None)

    def define(self, module_name: str, name: str) -> tuple[Module, Definition] | None:
        """Find the class or function that a name of a module stands for.

        Re-exports are followed, also those under ``if TYPE_CHECKING`` and those of a package that
        defers them to ``__getattr__``, as far as type checkers see them.

        Args:
            module_name: Dotted name of a module.
            name: A name in it.

        Returns:
            The defining module and the definition; ``None`` for constants, modules and names from
            other packages.
        """
        module = self.modules.get(module_name)
        if module is None:
            return None
        origin: tuple[str, str] | None = None
        for node in _top_level(module.tree.body):
            if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = absolute(module, node), alias.name
        return None if origin is None else self.define(*origin)

    def bases(self, module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
        """Yield a class and then its base classes, as far as the package defines them."""
        yield module, node
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(expression, ast.Name):
                definition = self.define(module.name, expression.id)
                if definition is not None and isinstance(definition[1], ast.ClassDef):
                    yield from self.bases(definition[0], definition[1])


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level([*node.body, *node.orelse])


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that a ``from`` import names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


class _ImportVisitor(ast.NodeVisitor):
    """Collect the imports of one module. Bodies of ``if TYPE_CHECKING`` are skipped."""

    def __init__(self, package: Package, module: Module) -> None:
        self.package = package
        self.module = module
        self.imports: list[Import] = []
        self._depth = 0  # of enclosing functions

    def _add(self, target: str | None, node: ast.stmt | ast.expr) -> None:
        if target is not None:
            place = self.module.place(node)
            self.imports.append(Import(self.module.name, target, self._depth > 0, place))

    def _enter(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _enter

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                self._add(self.package.find_module(alias.name), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = absolute(self.module, node)
        if base.split(".")[0] != PACKAGE:
            return
        targets: set[str | None] = set()
        for alias in node.names:
            target = self.package.find_module(f"{base}.{alias.name}")
            if target == PACKAGE:  # a name of the facade stands for the module that defines it
                definition = self.package.define(PACKAGE, alias.name)
                target = definition[0].name if definition else None
            targets.add(target)
        for target in sorted(filter(None, targets)):
            self._add(target, node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            text = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(text, str) and text.split(".")[0] == PACKAGE:
                self._add(self.package.find_module(text), node)
        self.generic_visit(node)


# --- files ---------------------------------------------------------------------------------------


def source_files(root: Path, folders: Iterable[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files below some folders that have one of the suffixes, sorted by path."""
    paths: list[Path] = []
    for folder in folders:
        if (root / folder).is_dir():
            paths += (path for path in (root / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def load_modules(root: Path, folders: Iterable[str]) -> list[Module]:
    """Read the Python files below some folders. Files that cannot be parsed are an error."""
    return [
        Module("", path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in source_files(root, folders, (".py",))
    ]


def entries(folder: Path) -> list[Path]:
    """Return the files and folders that count as entries of a source folder.

    Build results (``__pycache__``, ``.so``) and the marker ``py.typed`` do not count. A folder
    counts only if it holds a source file, since Git does not track empty ones.
    """
    ignored = ("__pycache__", "py.typed")
    return sorted(
        path
        for path in folder.iterdir()
        if path.name not in ignored
        and path.suffix not in (".so", ".pyc")
        and (path.is_file() or source_files(path.parent, [path.name], (".py", ".pyi")))
    )


# --- graphs --------------------------------------------------------------------------------------


def components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, imported ones before importing ones (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for successor in sorted(graph.get(node, ())):
            if successor not in order:
                visit(successor)
                lowest[node] = min(lowest[node], lowest[successor])
            elif successor in stack:
                lowest[node] = min(lowest[node], order[successor])
        if lowest[node] == order[node]:
            cut = stack.index(node)
            result.append(sorted(stack[cut:]))
            del stack[cut:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return result


def longest_chain(graph: Graph) -> list[list[str]]:
    """Return the longest path through the components of a graph, importing ones first."""
    best: dict[int, list[int]] = {}
    groups = components(graph)
    index = {node: number for number, group in enumerate(groups) for node in group}
    for number, group in enumerate(groups):  # successors have smaller numbers
        below = {index[target] for node in group for target in graph.get(node, ())} - {number}
        tail = max((best[successor] for successor in sorted(below)), key=len, default=[])
        best[number] = [number, *tail]
    return [groups[number] for number in max(best.values(), key=len, default=[])]


def graph_of(edges: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the adjacency sets of a list of edges. Edges of a node to itself are left out."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        graph[source]
        graph[target]
        if source != target:
            graph[source].add(target)
    return dict(graph)


def unit_of(module: str) -> str:
    """Return the unit of a module: the package and one more component."""
    return ".".join(module.split(".")[:2])


# --- figures: layout -----------------------------------------------------------------------------


def folder_figures(package: Package) -> Iterator[Figure]:
    """Count the entries of folders and the repeated file and class names."""
    top = package.root / PACKAGE
    folders = [top, *(path for path in sorted(top.rglob("*")) if path.is_dir())]
    folders = [path for path in folders if path.name != "__pycache__"]
    listed = {path: entries(path) for path in folders}

    def places(folder: Path) -> list[Place]:
        relative = folder.relative_to(package.root).as_posix()
        return [Place(relative, 1, path.name) for path in listed[folder]]

    count = str(len(listed[top]))
    yield Figure("top-entries", f"entries at the top of `{PACKAGE}/`", count, "<= 18", places(top))
    largest = max((path for path in folders if path != top), key=lambda path: len(listed[path]))
    value = f"{len(listed[largest])} ({largest.relative_to(package.root).as_posix()})"
    title = "entries of the largest folder below the top"
    yield Figure("largest-folder", title, value, "<= 16", places(largest))

    modules = package.modules.values()
    files = [(Path(module.path).name, Place(module.path, 1, "")) for module in modules]
    files = [(name, place) for name, place in files if name not in ("__init__.py", "__main__.py")]
    title = "file names used more than once, a torch/orbax pair counted as one"
    yield _repeated("same-file-names", title, files, "0")
    classes = [
        (node.name, Place(module.path, node.lineno, ""))
        for module in modules
        for node in module.classes
    ]
    title = "class names used more than once, a torch/orbax pair counted as one"
    yield _repeated("same-class-names", title, classes, "-")


def _repeated(name: str, title: str, uses: list[tuple[str, Place]], goal: str) -> Figure:
    """Count the names with several uses. One use in each backend is a parallel, and allowed."""
    grouped: dict[str, list[Place]] = defaultdict(list)
    for used_name, place in uses:
        grouped[used_name].append(place)
    places: list[Place] = []
    count = 0
    for used_name, found in sorted(grouped.items()):
        torch = sum(place.path.startswith(TORCH) for place in found)
        orbax = sum(place.path.startswith(ORBAX) for place in found)
        if len(found) - torch - orbax + max(torch, orbax) > 1:
            count += 1
            places += [Place(place.path, place.line, used_name) for place in sorted(found)]
    return Figure(name, title, str(count), goal, places)


# --- figures: imports ----------------------------------------------------------------------------


def import_figures(package: Package) -> Iterator[Figure]:
    """Measure depth, direction and cycles of the imports."""
    imports = package.imports
    unit_edges: dict[tuple[str, str], Import] = {}
    module_edges: dict[tuple[str, str], Import] = {}
    for edge in imports:
        module_edges.setdefault((edge.source, edge.target), edge)
        units = unit_of(edge.source), unit_of(edge.target)
        if units[0] != units[1]:
            unit_edges.setdefault(units, edge)

    chain = longest_chain(graph_of(unit_edges))
    title = "import layers: longest path of units, cycles condensed"
    places = _chain_places(chain, unit_edges)
    yield Figure("import-layers", title, str(len(chain)), "<= 12", places)
    chain = longest_chain(graph_of(module_edges))
    title = "import depth: longest path of modules, cycles condensed"
    places = _chain_places(chain, module_edges)
    yield Figure("import-depth", title, str(len(chain)), "-", places)
    places = [
        Place(edge.place.path, edge.place.line, f"{source} -> {target}: {edge.place.text}")
        for (source, target), edge in sorted(unit_edges.items())
    ]
    yield Figure("unit-edges", "edges between units", str(len(unit_edges)), "<= 95", places)

    yield from layer_figures(package)
    eager = [edge for edge in imports if not edge.lazy]
    title = "import cycles, imports in functions included"
    yield _cycles("cycles", title, imports)
    yield _cycles("cycles-eager", "import cycles at module level", eager)


def _chain_places(chain: list[list[str]], edges: Mapping[tuple[str, str], Import]) -> list[Place]:
    """Return one import for each step of a chain."""
    places: list[Place] = []
    for upper, lower in pairwise(chain):
        pairs = ((source, target) for source in upper for target in lower)
        pair = next(pair for pair in pairs if pair in edges)
        place = edges[pair].place
        text = f"{' + '.join(upper)} -> {' + '.join(lower)}: {place.text}"
        places.append(Place(place.path, place.line, text))
    return places


def _cycles(name: str, title: str, imports: list[Import]) -> Figure:
    graph = graph_of((edge.source, edge.target) for edge in imports)
    groups = sorted(group for group in components(graph) if len(group) > 1)
    places: list[Place] = []
    for number, group in enumerate(groups, 1):
        for edge in imports:
            if edge.source in group and edge.target in group:
                text = f"cycle {number}: {edge.source} -> {edge.target}: {edge.place.text}"
                places.append(Place(edge.place.path, edge.place.line, text))
    sizes = ", ".join(f"{len(group)} modules" for group in groups)
    return Figure(name, title, f"{len(groups)} ({sizes})" if groups else "0", "0", places)


@dataclass(frozen=True)
class Layer:
    """The place of a module in the contract.

    Attributes:
        number: Index of the layer, 0 at the top.
        entry: The contract's entry that covers the module.
        independent: Whether entries of this layer must not import each other (``|``).
    """

    number: int
    entry: str
    independent: bool


def read_contract(root: Path) -> dict[str, Layer]:
    """Read the first ``layers`` contract of import-linter from pyproject.toml.

    Returns:
        The layer of each entry; empty if there is no such contract.
    """
    configuration = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = configuration.get("tool", {}).get("importlinter", {}).get("contracts", [])
    layered = (entry for entry in contracts if entry.get("type") == "layers")
    contract: dict[str, list[str]] = next(layered, {})
    layers: dict[str, Layer] = {}
    for container in contract.get("containers") or [""]:
        for number, text in enumerate(contract.get("layers", ())):
            for part in re.split(r"[|:]", text):
                entry = f"{container}.{part.strip(' ()')}".lstrip(".")
                layers[entry] = Layer(number, entry, "|" in text)
    return layers


def layer_figures(package: Package) -> Iterator[Figure]:
    """Compare direct imports with the layers contract, and list what the contract leaves out.

    import-linter itself also follows chains of imports through modules outside the contract.
    """
    contract = read_contract(package.root)

    def layer_of(module: str) -> Layer | None:
        parts = module.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((contract[name] for name in prefixes if name in contract), None)

    places: list[Place] = []
    for edge in package.imports:
        upper, lower = layer_of(edge.source), layer_of(edge.target)
        if upper is None or lower is None or upper.entry == lower.entry:
            continue
        is_sibling = upper.number == lower.number
        if upper.number > lower.number or (is_sibling and upper.independent):
            kind = "sibling" if is_sibling else "upward"
            text = f"{kind}: {edge.source} -> {edge.target}: {edge.place.text}"
            places.append(Place(edge.place.path, edge.place.line, text))
    title = "imports that contradict the layers contract, facade excluded"
    yield Figure("upward-imports", title, str(len(places)), "0", places)

    outside = sorted(
        Place(module.path, 1, module.name)
        for module in package.modules.values()
        if module.name != PACKAGE and layer_of(module.name) is None
    )
    title = "modules outside the layers contract"
    yield Figure("outside-contract", title, str(len(outside)), "-", outside)


# --- figures: classes and functions --------------------------------------------------------------


def attributes(package: Package, module: Module, node: ast.ClassDef) -> set[str]:
    """Return the attribute names of a class, inherited ones excluded.

    These are the names assigned to ``self`` in any method and, for records (dataclasses,
    ``msgspec.Struct``, ``NamedTuple``, ``TypedDict`` and classes derived from one), the annotated
    fields.
    """
    names: set[str] = set()
    for method in node.body:
        if isinstance(method, _FUNCTIONS) and "staticmethod" not in decorators(method):
            positional = [*method.args.posonlyargs, *method.args.args]
            if positional:
                names |= _assigned(method, positional[0].arg)
    if _is_record(package, module, node):
        for field_node in node.body:
            if not isinstance(field_node, ast.AnnAssign):
                continue
            is_field = "ClassVar" not in ast.unparse(field_node.annotation)
            if is_field and isinstance(field_node.target, ast.Name):
                names.add(field_node.target.id)
    return names


def _assigned(parent: ast.AST, receiver: str) -> set[str]:
    """Return the attributes of ``receiver`` that a node assigns, nested classes excluded."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == receiver else set()
        names |= _assigned(node, receiver)
    return names


def _is_record(package: Package, module: Module, node: ast.ClassDef) -> bool:
    if "dataclass" in decorators(node):
        return True
    bases = [base for _, parent in package.bases(module, node) for base in parent.bases]
    names = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in bases}
    return bool(names & {"Struct", "NamedTuple", "TypedDict"})


def class_figures(package: Package) -> Iterator[Figure]:
    """Measure the length and the attributes of classes."""
    lengths: list[tuple[int, Place]] = []
    counts: list[tuple[int, Place]] = []
    for module in package.modules.values():
        for node in module.classes:
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            count = len(attributes(package, module, node))
            lengths.append((length, module.place(node, f"{node.name}: {length} lines")))
            counts.append((count, module.place(node, f"{node.name}: {count} attributes")))
    yield _above("class-lines", f"classes over {MAX_CLASS_LINES} lines", lengths, MAX_CLASS_LINES)
    title = f"classes over {MAX_ATTRIBUTES} attributes"
    yield _above("class-attributes", title, counts, MAX_ATTRIBUTES)
    largest = max(lengths, key=lambda entry: entry[0])[1]
    yield Figure("largest-class", "largest class", largest.text, "-", [largest])


def _above(name: str, title: str, measured: list[tuple[int, Place]], limit: int) -> Figure:
    exceeding = sorted(
        (entry for entry in measured if entry[0] > limit), key=lambda entry: -entry[0]
    )
    value = str(len(exceeding)) + (f" (largest {exceeding[0][0]})" if exceeding else "")
    return Figure(name, title, value, "0", [place for _, place in exceeding])


def function_figures(package: Package, api: PublicApi) -> Iterator[Figure]:
    """Count the functions with many parameters: public ones, CLI commands and internal ones."""
    kinds: dict[str, list[tuple[int, Place]]] = defaultdict(list)
    for module in package.modules.values():
        for function in module.functions:
            count = len(function.parameters)
            if function.node in api.functions:
                kind = "public"
            else:
                kind = "cli" if _is_command(function.node) else "internal"
            text = f"{module.name}.{function.qualified_name}: {count} parameters"
            kinds[kind].append((count, module.place(function.node, text)))
    title = (
        f"functions with more than {MAX_PARAMETERS} parameters, {{}} (self and *args not counted)"
    )
    for kind, goal in (("public", "-"), ("internal", "0"), ("cli", "-")):
        label = "commands of the CLI" if kind == "cli" else kind
        figure = _above(f"parameters-{kind}", title.format(label), kinds[kind], MAX_PARAMETERS)
        yield Figure(figure.name, figure.title, figure.value, goal, figure.places)


def _is_command(node: FunctionNode) -> bool:
    """Return whether a function takes options of the command line, which its users decide on."""
    arguments = (*node.args.args, *node.args.kwonlyargs)
    annotations = (ast.unparse(entry.annotation) for entry in arguments if entry.annotation)
    # Every command takes --json, whose annotation has this name.
    return any("typer.Option" in text or text == "Json" for text in annotations)


def size_figures(package: Package) -> Iterator[Figure]:
    """Measure the size of functions and modules, and how densely they are written."""
    modules = list(package.modules.values())
    functions = [function for module in modules for function in module.functions]
    by_length = sorted(functions, key=lambda function: -function.length)
    lengths = [function.length for function in functions]
    title = "function length in lines, median / p90 / max"
    longest = [
        Place(f.place.path, f.place.line, f"{f.place.text}: {f.length} lines")
        for f in by_length[:20]
    ]
    yield Figure("function-length", title, _distribution(lengths), "-", longest)
    yield Figure("functions", "functions", str(len(functions)))
    lines = [(f.length_of_code, f.place) for f in functions]
    title = f"functions of more than {MAX_FUNCTION_LINES} lines, docstrings not counted"
    yield replace(_above("long-functions", title, lines, MAX_FUNCTION_LINES), goal="<= 25")
    branches = [(f.complexity, f.place) for f in functions]
    title = f"functions with a complexity of more than {MAX_COMPLEXITY}"
    yield replace(_above("complex-functions", title, branches, MAX_COMPLEXITY), goal="<= 25")

    sizes = [len(module.lines) for module in modules]
    title = "module length in lines, median / p90 / max"
    by_size = sorted(modules, key=lambda module: -len(module.lines))
    longest = [Place(module.path, 1, f"{len(module.lines)} lines") for module in by_size[:20]]
    yield Figure("module-length", title, _distribution(sizes), "-", longest)

    statements = docstrings = 0
    for module in modules:
        for node in ast.walk(module.tree):
            statements += isinstance(node, ast.stmt)
            if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and docstring_of(node):
                statements -= 1
                docstrings += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    code = sum(code_lines(module) for module in modules)
    title = f"lines of code in `{PACKAGE}/`: no blank lines, comments or docstrings"
    yield Figure("code-lines", title, str(code), "<= 40000")
    total = sum(sizes)
    yield Figure("python-lines", f"lines of Python in `{PACKAGE}/`", str(total))
    title = "statements per line, docstrings not counted"
    yield Figure("statements", title, f"{statements / total:.2f}")
    yield Figure("docstring-lines", "share of docstring lines", percent(docstrings, total))


def code_lines(module: Module) -> int:
    """Count the lines of a module that are neither blank nor a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and docstring_of(node):
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _distribution(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]} / {ordered[int(0.9 * len(ordered))]} / {ordered[-1]}"


def percent(count: int, total: int, digits: int = 1) -> str:
    """Return a share as text, such as ``"7.1 %"``."""
    return f"{100 * count / max(total, 1):.{digits}f} %"


# --- figures: public names -----------------------------------------------------------------------


@dataclass
class PublicApi:
    """The names that are documented as public.

    Attributes:
        names: The dotted names.
        functions: The public function or method of each of these nodes.
        classes: The public class of each of these nodes, with the dotted name.
        docs: The docstring that applies to a function node: its own or the one it overrides.
    """

    names: set[str] = field(default_factory=set)
    functions: dict[FunctionNode, Function] = field(default_factory=dict)
    classes: dict[ast.ClassDef, tuple[str, Module]] = field(default_factory=dict)
    docs: dict[FunctionNode, str] = field(default_factory=dict)


def public_names(package: Package, file: Path | None) -> set[str]:
    """Return the dotted names that are public.

    Args:
        package: The package.
        file: A JSON list of dotted names, or of objects with a ``name``. ``None``: take the names
            of the release, if they are listed, and each ``__all__`` of the facades.
    """
    if file is not None:
        listed = json.loads(file.read_text(encoding="utf-8"))
        return {entry["name"] if isinstance(entry, dict) else entry for entry in listed}
    names: set[str] = set()
    released = package.root / PUBLIC_NAMES
    if released.is_file():
        lines = released.read_text(encoding="utf-8").splitlines()
        names |= {line.partition("(")[0] for line in lines}
    for facade in FACADES:
        for node in package.modules[facade].tree.body if facade in package.modules else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= {f"{facade}.{name}" for name in ast.literal_eval(node.value)}
    return names


def public_api(package: Package, names: set[str]) -> PublicApi:
    """Find the definitions of public names, and the public methods of public classes."""
    api = PublicApi(names)
    for name in sorted(names):
        module_name = package.find_module(name)
        if module_name == name:  # a function may have the name of its module: orbax.manager
            module_name = package.find_module(name.rpartition(".")[0])
        if module_name is None:
            continue
        rest = name.removeprefix(f"{module_name}.").split(".")
        definition = package.define(module_name, rest[0])
        if definition is None:
            continue
        module, node = definition
        if isinstance(node, ast.ClassDef):
            _add_class(api, package, f"{module_name}.{rest[0]}", module, node)
        elif len(rest) == 1:
            _add_function(api, Function(module, node.name, node, None))
    return api


def _add_class(
    api: PublicApi, package: Package, name: str, module: Module, node: ast.ClassDef
) -> None:
    if node in api.classes:
        return
    api.classes[node] = name, module
    inherited: dict[str, Function] = {}
    for base_module, base in package.bases(module, node):
        for method in base.body:
            if not isinstance(method, _FUNCTIONS) or decorators(method) & {"overload", "setter"}:
                continue
            if method.name.startswith("_") and method.name != "__init__":
                continue
            function = Function(base_module, f"{base.name}.{method.name}", method, base)
            nearest = inherited.setdefault(method.name, function)
            # An override without a docstring takes that of the method that it overrides.
            api.docs.setdefault(nearest.node, docstring_of(method) or "")
            if not api.docs[nearest.node]:
                api.docs[nearest.node] = docstring_of(method) or ""
    for function in inherited.values():
        _add_function(api, function)


def _add_function(api: PublicApi, function: Function) -> None:
    api.functions[function.node] = function
    api.docs.setdefault(function.node, docstring_of(function.node) or "")


def docstring_figures(package: Package, api: PublicApi) -> Iterator[Figure]:
    """Count public names, and all names without underscore, whose docstring lacks a section."""
    title = "public names without a docstring, or without Args or Returns where they apply"
    places = _lacking_places(api)
    total = len(_documentable(api.functions.values())) + len(api.classes)
    yield Figure("undocumented-public", title, f"{len(places)} of {total}", "0", places)

    places = [
        Place(function.place.path, function.place.line, f"{function.place.text}: Raises")
        for function in _documentable(api.functions.values())
        if _raises(function.node) and "Raises:" not in api.docs[function.node]
    ]
    title = "public functions that raise directly, without Raises"
    yield Figure("undocumented-raises", title, str(len(places)), "0", places)

    every: list[Function] = []
    for module in package.modules.values():
        for function in module.functions:
            # Names of classes and modules on the way may be private; nested functions are.
            parts = function.qualified_name.split(".")
            is_nested = len(parts) > (1 if function.owner is None else 2)
            if not is_nested and not any(part.startswith("_") for part in parts):
                every.append(function)
    documentable = _documentable(every)
    places = []
    for function in documentable:
        doc = api.docs.get(function.node) or docstring_of(function.node) or ""
        if lacking := _lacking(function, doc):
            place = function.place
            places.append(Place(place.path, place.line, f"{place.text}: {', '.join(lacking)}"))
    title = "all functions and methods without underscore, the same question"
    value = f"{len(places)} of {len(documentable)}"
    yield Figure("undocumented-all", title, value, "-", places)


def _documentable(functions: Iterable[Function]) -> list[Function]:
    """Leave out constructors (their class is asked), overloads, and the tests of contracts."""
    return [
        function
        for function in functions
        if not function.node.name.startswith(("__", "test_"))
        and not decorators(function.node) & {"overload", "fixture", "setter", "deleter"}
    ]


def _lacking(function: Function, doc: str) -> list[str]:
    """Return the sections that a docstring should have and has not."""
    if not doc:
        return ["docstring"]
    node = function.node
    lacking: list[str] = []
    if (function.parameters or node.args.vararg or node.args.kwarg) and "Args:" not in doc:
        lacking.append("Args")
    # A property is documented as the value that it is.
    if not decorators(node) & {"property", "cached_property"} and node.returns is not None:
        returns = ast.unparse(node.returns).strip("'\"")
        if returns not in ("None", "NoReturn", "Never", "Self") and not re.search(
            r"\b(Returns|Yields):", doc
        ):
            lacking.append("Returns")
    return lacking


def _lacking_places(api: PublicApi) -> list[Place]:
    places: list[Place] = []
    for function in _documentable(api.functions.values()):
        if lacking := _lacking(function, api.docs[function.node]):
            place = function.place
            places.append(Place(place.path, place.line, f"{place.text}: {', '.join(lacking)}"))
    for node, (name, module) in api.classes.items():
        methods = (entry for entry in node.body if isinstance(entry, _FUNCTIONS))
        constructor = next((method for method in methods if method.name == "__init__"), None)
        doc = (docstring_of(node) or "") + (docstring_of(constructor) or "" if constructor else "")
        arguments = constructor.args if constructor else None
        needs_arguments = arguments is not None and bool(
            arguments.args[1:] or arguments.kwonlyargs or arguments.vararg or arguments.kwarg
        )
        if not doc:
            places.append(module.place(node, f"{name}: docstring"))
        elif needs_arguments and not re.search(r"\b(Args|Attributes):", doc):
            places.append(module.place(node, f"{name}: Args of the constructor"))
    return places


def _raises(node: FunctionNode) -> bool:
    """Return whether a function raises an exception by name in its own body."""
    pending: list[ast.AST] = list(node.body)
    while pending:
        child = pending.pop()
        if isinstance(child, (ast.Lambda, ast.ClassDef, *_FUNCTIONS)):
            continue
        exception = child.exc if isinstance(child, ast.Raise) else None
        if exception is not None and "NotImplementedError" not in ast.unparse(exception):
            return True
        pending += ast.iter_child_nodes(child)
    return False


# --- figures: language ---------------------------------------------------------------------------


def line_figures(root: Path) -> Iterator[Figure]:
    """Count the lines that are too long."""
    kinds = (
        ("Python", "python", PYTHON_FOLDERS, (".py",)),
        ("C++ and CUDA", "cpp", CPP_FOLDERS, CPP_SUFFIXES),
    )
    for label, name, folders, suffixes in kinds:
        places: list[Place] = []
        total = 0
        for path in source_files(root, folders, suffixes):
            lines = path.read_text(encoding="utf-8").splitlines()
            total += len(lines)
            relative = path.relative_to(root).as_posix()
            for number, line in enumerate(lines, 1):
                if _columns(line) > MAX_COLUMNS:
                    places.append(Place(relative, number, f"{len(line)} columns: {line.strip()}"))
        title = f"lines over {MAX_COLUMNS} columns, {label}"
        value = f"{len(places)} of {total} ({percent(len(places), total)})"
        yield Figure(f"long-lines-{name}", title, value, "0", places)


def _columns(line: str) -> int:
    """Return the columns of a line that count, as in ruff's E501.

    A directive for a tool at its end does not count, nor does a line that cannot be broken because
    it is one word.
    """
    text = re.sub(r"\s*# (?:type:|noqa).*", "", line)
    return len(text) if len(text.split()) > 1 else 0


def clause_figures(root: Path) -> Iterator[Figure]:
    """Count the docstrings that begin with a relative clause."""
    places: list[Place] = []
    total = 0
    for module in load_modules(root, DOCSTRING_FOLDERS):
        for node in _documented(module.tree):
            doc = docstring_of(node)
            total += doc is not None
            if doc is not None and RELATIVE_CLAUSE.match(doc):
                places.append(module.place(node.body[0], doc.strip().splitlines()[0]))
    value = f"{len(places)} of {total} ({percent(len(places), total)})"
    title = "docstrings that begin with a relative clause (What, Which, Whether, ...)"
    yield Figure("relative-clauses", title, value, "0", places)


def _documented(node: ast.AST) -> Iterator[ast.Module | Definition]:
    """Yield the module, class or function, and all that its statements define."""
    if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # most nodes, and none defines anything
            yield from _documented(child)


def name_figures(package: Package) -> Iterator[Figure]:
    """Measure the share of assigned and parameter names that are function words."""
    places: list[Place] = []
    counts: Counter[str] = Counter()
    total = 0
    for module in package.modules.values():
        for name, node in bound_names(module.tree):
            total += 1
            word = name.strip("_")
            if word in FUNCTION_WORDS:
                counts[word] += 1
                places.append(Place(module.path, node.lineno, name))
    value = f"{len(places)} of {total} ({percent(len(places), total, 2)})"
    title = "assigned and parameter names that are function words"
    yield Figure("function-words", title, value, "< 0.3 %", sorted(places))
    frequent = ", ".join(f"{word} {count}" for word, count in counts.most_common(10))
    title = "the ten most frequent of them"
    places.sort(key=lambda place: (-counts[place.text.strip("_")], place.text.strip("_")))
    yield Figure("function-words-frequent", title, frequent or "-", "-", places)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, ast.expr | ast.arg]]:
    """Yield each name that is assigned, each parameter and each assigned attribute.

    The parameter ``other`` of a binary operator is left out: Python itself calls it so.
    """
    operands = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and node.name.startswith("__")
        for argument in node.args.args
        if argument.arg == "other"
    }
    for node in ast.walk(tree):
        if node in operands:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node


def comment_figures(root: Path) -> Iterator[Figure]:
    """Measure the share of non-blank lines with a comment that can give a reason."""
    finders: dict[str, Callable[[str], dict[int, str]]] = {
        "python": python_comments,
        "cpp": cpp_comments,
    }
    kinds = (
        ("Python", "python", PACKAGE, (".py",), ">= 4 %"),
        ("C++", "cpp", "xla_ffi", CPP_SUFFIXES, ">= 10 %"),
    )
    for label, name, folder, suffixes, goal in kinds:
        places: list[Place] = []
        total = 0
        for path in source_files(root, [folder], suffixes):
            source = path.read_text(encoding="utf-8")
            total += sum(1 for line in source.splitlines() if line.strip())
            relative = path.relative_to(root).as_posix()
            places += (
                Place(relative, line, text) for line, text in sorted(finders[name](source).items())
            )
        value = f"{percent(len(places), total)} ({len(places)} of {total})"
        title = f"lines with a comment, of non-blank lines, {label} in `{folder}/`"
        yield Figure(f"comments-{name}", title, value, goal, places)


def python_comments(source: str) -> dict[int, str]:
    """Return the comment of each line. Directives, rulers and license headers are left out."""
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            is_ruler = not text or _RULER.match(token.string.lstrip("# ") or "#")
            if not is_ruler and not _LICENSE.search(text) and not _PYTHON_DIRECTIVE.match(text):
                comments[token.start[0]] = text
    return comments


_CPP_TOKEN = re.compile(
    r"""
    (?P<comment> //[^\n]* | /\*.*?\*/ )
    | R"(?P<mark>[^()\s\\]*)\(.*?\)(?P=mark)"
    | "(?:\\.|[^"\\\n])*"
    | (?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'   # a quote after a digit separates digits
    """,
    re.VERBOSE | re.DOTALL,
)


def cpp_comments(source: str) -> dict[int, str]:
    """Return the comment of each line. Directives, rulers and license headers are left out."""
    comments: dict[int, str] = {}
    for match in _CPP_TOKEN.finditer(source):
        if match["comment"] is None:
            continue
        first = source.count("\n", 0, match.start()) + 1
        for line, text in enumerate(match["comment"].splitlines(), first):
            text = re.sub(r"^\s*(//+<?|/\*+|\*+/?)|\*+/$", "", text).strip()
            is_reason = text and not _RULER.match(text) and not _LICENSE.search(text)
            if is_reason and not _CPP_DIRECTIVE.match(text):
                comments[line] = text
    return comments


# --- command line --------------------------------------------------------------------------------


def measure(root: Path, public_file: Path | None = None) -> list[Figure]:
    """Measure every figure of a checkout.

    Args:
        root: The checkout: the folder that holds ``deltacheck/`` and ``pyproject.toml``.
        public_file: See ``public_names``.

    Returns:
        The figures in the order in which they are printed.

    Raises:
        FileNotFoundError: If the checkout has no ``deltacheck/__init__.py``.
        SyntaxError: If a Python file cannot be parsed.
    """
    if not (root / PACKAGE / "__init__.py").is_file():
        raise FileNotFoundError(f"{root} holds no {PACKAGE}/__init__.py")
    package = Package.load(root)
    api = public_api(package, public_names(package, public_file))
    return [
        *folder_figures(package),
        *import_figures(package),
        *class_figures(package),
        *function_figures(package, api),
        *docstring_figures(package, api),
        *line_figures(root),
        *clause_figures(root),
        *name_figures(package),
        *comment_figures(root),
        *size_figures(package),
    ]


def table(figures: Iterable[Figure]) -> str:
    """Return the figures as a Markdown table."""
    rows = ["| name | figure | value | goal |", "|---|---|---|---|"]
    rows += (f"| {f.name} | {f.title} | {f.value} | {f.goal} |" for f in figures)
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for misuse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path("."))
    parser.add_argument("--public", type=Path, metavar="FILE", help="a JSON list of public names")
    parser.add_argument("--list", metavar="NAME", help="print the places behind one figure")
    options = parser.parse_args(arguments)
    try:
        figures = measure(options.checkout, options.public)
    except FileNotFoundError as error:
        parser.error(str(error))
    if options.list is None:
        print(table(figures))
        return 0
    by_name = {figure.name: figure for figure in figures}
    if options.list not in by_name:
        parser.error(f"--list takes one of: {', '.join(by_name)}")
    for place in by_name[options.list].places:
        print(place)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader of a long list, such as `head`, has ended
        sys.stderr.close()
