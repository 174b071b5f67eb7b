"""Refuse tests whose verdict depends on elapsed time.

``python -m tests.suites.clock_lint`` (part of ``make lint``) reads the syntax trees of all files
under tests/, and prints each of these:

- ``compare``: a comparison with an operand that comes from a clock (``time.monotonic()`` and its
  like, also through variables and arithmetic), or an order comparison with a name, attribute or
  key that ends in ``seconds``, ``elapsed``, ``duration`` or ``took``;
- ``sleep``: ``time.sleep``, ``asyncio.sleep`` or ``threading.Timer``;
- ``limit``: a wait (``wait``, ``join``, ``result``, ``exception``, ``timeout=``,
  ``..._timeout_seconds=``) that gives up after less than ``SHORTEST_SECONDS``. Within
  ``pytest.raises`` it is meant to give up.

Programs in strings are read, too. A test orders its threads by events, hands in a clock, or
waits by ``tests.support.waiting``. What must differ is listed in ``EXCEPTIONS``, with a reason.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests",)
SHORTEST_SECONDS = 240.0

CLOCKS = {
    name + suffix
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for suffix in ("", "_ns")
}
# Calls whose result is as much a time as their arguments are.
ARITHMETIC = {"abs", "float", "int", "max", "min", "round", "sum"}
MEASURED = re.compile(r"(?:^|_)(?:seconds|elapsed|duration|took)$", re.IGNORECASE)
TIMEOUT = re.compile(r"(?:^|_)timeout(?:_seconds)?$")
WAITS = {"persist", "wait", "join", "result", "exception", "acquire", "communicate"}
PROGRAM = re.compile(
    r"sleep\(|Timer\(|monotonic\(|perf_counter\(|(?:process_)?time\(|\.wait\(|timeout="
)


class Exemption(NamedTuple):
    """A function, or a file if ``function`` is ``"*"``, to which one rule does not apply."""

    file: str
    function: str
    rule: str
    reason: str


_ENDS_A_HANG = "a limit that a busy machine does not reach; it ends a hang"
_MOMENT = "chooses a moment, which decides no verdict"
_BUDGET = "spends a budget of time that the caller gives; no verdict"
_PASSES = "a limit that is to pass: what is waited for is dead"
_PREDICTED = "compares predictions, which are computed from constants"

EXCEPTIONS = (
    Exemption(
        "tests/backends/orbax/test_orbax_contract.py",
        "test_v1_saves_that_overlap_are_all_saved",
        "sleep",
        "slow folders of saves that may overlap; they are saved at any speed",
    ),
    Exemption(
        "tests/backends/torch/test_weight_transfer.py",
        "test_a_rollout_worker_of_verl_does_not_wait_forever",
        "limit",
        _PASSES,
    ),
    Exemption("tests/faults/trials.py", "_late", "compare", _ENDS_A_HANG),
    Exemption(
        "tests/faults/image.py", "mounted", "sleep", "the kernel tells nobody when it lets go"
    ),
    Exemption("tests/faults/image.py", "try_cuts", "sleep", _MOMENT),
    Exemption("tests/fuzz/readers.py", "run", "compare", "a budget, and processor time as a bound"),
    Exemption("tests/gpu_kit/part.py", "_outcome", "compare", _BUDGET),
    Exemption("tests/gpu_kit/run.py", "_run_parts", "compare", _BUDGET),
    Exemption(
        "tests/gpu_kit/test_kit.py",
        "test_a_part_that_hangs_is_ended_and_its_results_stay",
        "sleep",
        "the program that hangs",
    ),
    Exemption(
        "tests/gpu_kit/test_kit.py",
        "test_the_parts_that_tell_most_fit_into_ten_minutes",
        "compare",
        "limits and usual times that the kit states",
    ),
    Exemption("tests/profile/test_planner.py", "*", "compare", _PREDICTED),
    Exemption("tests/ranks/jax_run.py", "die_in_save", "sleep", _MOMENT),
    Exemption("tests/ranks/jax_run.py", "die_in_save", "limit", _PASSES),
    Exemption("tests/ranks/setup_jobs.py", "die_before_the_group", "limit", _PASSES),
    Exemption("tests/ranks/jax_v1_jobs.py", "train_until_preempted", "sleep", "a step of training"),
    Exemption("tests/ranks/launch.py", "launch", "limit", "the ranks are killed right after"),
    Exemption("tests/save/test_schedules.py", "*", "sleep", _MOMENT),
    Exemption("tests/suites/ci.py", "main", "sleep", "reports what has not ended; no verdict"),
    Exemption("tests/suites/clock_lint.py", "_Visitor.visit_Call", "compare", "the rule itself"),
    *(
        Exemption("tests/suites/test_clock_lint.py", "*", rule, "programs that the lint refuses")
        for rule in ("compare", "sleep", "limit")
    ),
    Exemption("tests/suites/endurance.py", "*", "compare", _BUDGET),
    Exemption("tests/suites/endurance.py", "_live", "sleep", _MOMENT),
    Exemption("tests/suites/flaky.py", "slow", "compare", "finds tests whose time depends on load"),
    Exemption("tests/suites/signals.py", "run_child", "sleep", _MOMENT),
    Exemption("tests/suites/signals.py", "run_child", "compare", _ENDS_A_HANG),
    Exemption("tests/suites/soak.py", "soak", "compare", _BUDGET),
    Exemption("tests/support/data_kills.py", "_generate", "sleep", _MOMENT),
    Exemption("tests/support/exits_child.py", "fork_all", "compare", _ENDS_A_HANG),
    Exemption("tests/support/exits_child.py", "*", "sleep", "slow work and moments of signals"),
    Exemption("tests/support/lightning_child.py", "Net.training_step", "sleep", "polls for a file"),
    Exemption("tests/support/s3_server.py", "_Faulty.__call__", "sleep", "a server that is late"),
    Exemption("tests/support/waiting.py", "*", "compare", _ENDS_A_HANG),
    Exemption("tests/support/waiting.py", "*", "sleep", "the one place that polls"),
)


class Finding(NamedTuple):
    """A place that breaks a rule."""

    file: str
    line: int
    function: str
    rule: str
    text: str

    def __str__(self) -> str:
        where = f" in {self.function}" if self.function else ""
        return f"{self.file}:{self.line}: {self.rule}{where}: {self.text}"


def main(exceptions: Sequence[Exemption] = EXCEPTIONS) -> int:
    """Print all findings and unused exceptions; return 1 if there are any, otherwise 0."""
    findings = [
        finding
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for finding in lint(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    left, unused = without_exceptions(findings, exceptions)
    for line in (*left, *unused):
        print(line)
    return 1 if left or unused else 0


def without_exceptions(
    findings: Iterable[Finding], exceptions: Sequence[Exemption]
) -> tuple[list[Finding], list[str]]:
    """Return the findings that no exception covers, and a line for each unused exception."""
    left, used = [], set()
    for finding in findings:
        covering = [entry for entry in exceptions if _covers(entry, finding)]
        used.update(covering)
        if not covering:
            left.append(finding)
    unused = [
        f"{entry.file}: no {entry.rule} in {entry.function}: remove the exception from"
        f" {Path(__file__).relative_to(ROOT)}"
        for entry in exceptions
        if entry not in used
    ]
    return left, unused


def _covers(entry: Exemption, finding: Finding) -> bool:
    if (entry.file, entry.rule) != (finding.file, finding.rule):
        return False
    return entry.function == "*" or f"{finding.function}.".startswith(f"{entry.function}.")


def lint(source: str, file: str) -> list[Finding]:
    """Return what breaks a rule in the program ``source``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of programs in strings
        visitor = _Visitor(file, source.splitlines())
        visitor.program(ast.parse(source))
    return sorted(visitor.findings)


@dataclass
class _Scope:
    """Names of one function whose values come from a clock."""

    name: str
    outer: _Scope | None = None
    timed: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.timed or (self.outer is not None and self.outer.has(name))


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, lines: Sequence[str], function: str = "", offset: int = 0):
        self.findings: set[Finding] = set()
        self._file, self._lines, self._offset = file, lines, offset
        self._scope = _Scope(function)
        self._modules: dict[str, str] = {}  # name here -> module or module.name
        self._raising = 0

    def program(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._modules |= {n.asname or n.name: n.name for n in node.names}
            elif isinstance(node, ast.ImportFrom):
                self._modules |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
        self._read_names(tree)
        self.visit(tree)

    # Scopes

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, raising = self._scope, self._raising
        self._scope, self._raising = _Scope(self._qualified(node.name), outer), 0
        self._read_names(node)
        self.generic_visit(node)
        self._scope, self._raising = outer, raising

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._scope
        self._scope = _Scope(self._qualified(node.name), outer)
        self.generic_visit(node)
        self._scope = outer

    def _qualified(self, name: str) -> str:
        return f"{self._scope.name}.{name}" if self._scope.name else name

    def _read_names(self, scope: ast.AST) -> None:
        """Find the names of a scope that are assigned times, until there are no more."""
        nodes, count = list(_own_nodes(scope)), -1
        while count != len(self._scope.timed):
            count = len(self._scope.timed)
            for node in nodes:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._assign(target, node.value)
                elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
                    self._assign(node.target, node.value)
                elif (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("append", "add")
                    and any(map(self._is_timed, node.args))
                ):
                    self._assign(node.func.value, node.args[0])

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for one, of in zip(target.elts, value.elts, strict=True):
                    self._assign(one, of)
        elif isinstance(target, ast.Name | ast.Attribute) and self._is_timed(value):
            self._scope.timed.add(ast.unparse(target))

    # Rules

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = (node.left, *node.comparators)
        ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
        if any(map(self._is_timed, operands)) or (ordered and any(map(_is_measured, operands))):
            self._report(node, "compare")
        self.generic_visit(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        raising = any("raises" in ast.unparse(item.context_expr) for item in node.items)
        for item in node.items:
            self.visit(item)
        self._raising += raising
        for child in node.body:
            self.visit(child)
        self._raising -= raising

    visit_AsyncWith = visit_With

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._check_sleep(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._check_sleep(node)

    def _check_sleep(self, node: ast.Name | ast.Attribute) -> None:
        if self._origin(node) in ("time.sleep", "asyncio.sleep", "threading.Timer"):
            self._report(node, "sleep")

    def visit_Call(self, node: ast.Call) -> None:
        limits = [word.value for word in node.keywords if TIMEOUT.search(word.arg or "")]
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in WAITS and node.args:
            limits.append(node.args[-1])
        if not self._raising and any(0 < _number(limit) < SHORTEST_SECONDS for limit in limits):
            self._report(node, "limit")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and PROGRAM.search(node.value):
            self._read_program(node.value, node.lineno)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [p.value if isinstance(p, ast.Constant) else "_" for p in node.values]
        if PROGRAM.search(text := "".join(map(str, parts))):
            self._read_program(text.replace("{{", "{").replace("}}", "}"), node.lineno)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part)

    def _read_program(self, text: str, line: int) -> None:
        try:
            tree = ast.parse(textwrap.dedent(text))
        except (SyntaxError, ValueError):
            return
        inner = _Visitor(self._file, self._lines, self._scope.name, self._offset + line - 1)
        inner.program(tree)
        self.findings |= inner.findings

    def _report(self, node: ast.expr, rule: str) -> None:
        text = " ".join(ast.unparse(node).split())
        line = node.lineno + self._offset
        self.findings.add(Finding(self._file, line, self._scope.name, rule, text))

    # Expressions

    def _is_timed(self, node: ast.AST) -> bool:
        """Return whether the value of an expression is computed from that of a clock."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=args) if name in ARITHMETIC:
                return any(map(self._is_timed, args))
            case ast.Call(func=ast.Name() | ast.Attribute() as function):
                module, _, name = self._origin(function).rpartition(".")
                return module == "time" and name in CLOCKS
            case ast.BinOp(left=left, right=right):
                return self._is_timed(left) or self._is_timed(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._is_timed(operand)
            case ast.IfExp(body=body, orelse=other):
                return self._is_timed(body) or self._is_timed(other)
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self._is_timed(value)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return any(map(self._is_timed, elements))
            case ast.Name() | ast.Attribute():
                return self._scope.has(ast.unparse(node))
        return False

    def _origin(self, node: ast.expr) -> str:
        """Return the full name of what a name or an attribute of a module stands for."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id, "")
        if isinstance(node, ast.Attribute) and (module := self._origin(node.value)):
            return f"{module}.{node.attr}"
        return ""


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(child)


def _is_measured(node: ast.expr) -> bool:
    """Return whether an operand bears the name of a duration."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(MEASURED.search(name))
        case ast.Call(func=ast.Name(id=function), args=args) if function in ARITHMETIC:
            return any(map(_is_measured, args))
        case ast.Call(func=ast.Name() | ast.Attribute() as function):
            return _is_measured(function)
        case ast.Subscript(value=value, slice=key):
            named = isinstance(key, ast.Constant) and isinstance(key.value, str)
            return (named and bool(MEASURED.search(key.value))) or _is_measured(value)
        case ast.BinOp(left=left, right=right):
            return _is_measured(left) or _is_measured(right)
    return False


def _number(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
