"""The places that ``clock_lint`` refuses, and those that it lets pass."""

from __future__ import annotations

import textwrap

import pytest

from tests.suites.clock_lint import Exemption, lint, without_exceptions

pytestmark = pytest.mark.tools


@pytest.mark.parametrize(
    ("rule", "program"),
    [
        ("compare", "import time\nbegin = time.monotonic()\nassert time.monotonic() - begin < 3"),
        ("compare", "from time import perf_counter as now\nend = now() + 9\nassert end > 5"),
        ("compare", "import time\nspent = []\nspent.append(time.time())\nassert max(spent) < 2"),
        ("compare", "assert handle.timing.blocking_seconds > 0.2"),
        ("compare", "assert found['elapsed'] <= 1"),
        ("sleep", "import time\ntime.sleep(0.1)"),
        ("sleep", "from time import sleep\ndef test():\n    sleep(1)"),
        ("sleep", "import threading\nthreading.Timer(1, print).start()"),
        ("sleep", "CHILD = '''\nimport time\ntime.sleep(5)\n'''"),
        ("limit", "thread.join(5)"),
        ("limit", "event.wait(timeout=2.5)"),
        ("limit", "engine.persist(30)"),
        ("limit", "join('name', 20.0)"),
        ("limit", "SaveOptions(io_timeout_seconds=20)"),
    ],
)
def test_clocks_sleeps_and_short_limits_are_refused(rule: str, program: str) -> None:
    assert [finding.rule for finding in lint(program, "tests/test_a.py")] == [rule]


@pytest.mark.parametrize(
    "program",
    [
        "thread.join(240)",
        "event.wait()",
        "with pytest.raises(TimeoutError):\n    handle.wait(timeout=0.1)",
        "assert clock.slept == [1.0, 2.0]",
        "assert options.io_timeout_seconds == 30",
        "import time\nprint(time.monotonic())",
    ],
)
def test_what_decides_nothing_by_time_is_allowed(program: str) -> None:
    assert lint(program, "tests/test_a.py") == []


def test_an_exception_holds_for_one_rule_in_one_function_and_must_be_used() -> None:
    program = textwrap.dedent("""
        import time
        def one():
            time.sleep(1)
        def two():
            time.sleep(1)
    """)
    findings = lint(program, "a.py")
    left, unused = without_exceptions(
        findings,
        [Exemption("a.py", "one", "sleep", "r"), Exemption("a.py", "two", "compare", "r")],
    )
    assert [(finding.function, finding.line) for finding in left] == [("two", 6)]
    assert len(unused) == 1
    assert unused[0].startswith("a.py: no compare in two")
