"""Part 1: the device's own test, the engine's tests of devices, and its three shadows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from benchmarks.record import Cell, Result, Table
from benchmarks.workloads import equality
from deltacheck import SaveOptions
from tests.gpu_kit.stand_in import accelerator
from tests.gpu_kit.steps import Context, Skipped, Step

SHADOWS = ("device", "host", "none")
_TESTS = Path(__file__).parents[1]


def import_module(context: Context) -> Result:
    """Import the CUDA module, and report if it can use a device."""
    try:
        from deltacheck import _native_cuda
    except ImportError as error:
        if context.rehearse:
            raise Skipped(f"this build has no CUDA encoder ({error})") from error
        raise
    problem = _native_cuda.problem()
    if problem and not context.rehearse:
        raise RuntimeError(problem)
    handlers = ", ".join(name for name, *_ in _native_cuda.registrations()) or "none"
    about = f"interface {_native_cuda.INTERFACE}, XLA handlers: {handlers}; {problem or 'usable'}"
    return Result("the CUDA module", about, [])


def check_device(context: Context) -> Result:
    """Run the test that the engine makes before it first uses a device."""
    import torch

    from deltacheck.backends.torch.capture import self_test

    with accelerator(context) as device:
        if device.native is None:  # what the engine's own test leaves of a device that fails it
            from deltacheck import _native_cuda
            from deltacheck.backends.torch.capture.device import Accelerator

            problem = self_test.defect(Accelerator(torch.device("cuda", 0), _native_cuda))
            raise RuntimeError(f"the device fails its test: {problem or 'not repeatable'}")
        problem = self_test.defect(device)
        if problem:
            raise RuntimeError(f"the device fails its test: {problem}")
        name = device.name if context.rehearse else torch.cuda.get_device_name()
    return Result("the device's own test", f"{name}: rows, streams, digests and shadow agree", [])


def run_tests(context: Context, *files: str) -> Result:
    """Run test files: those of a device, or in a rehearsal those of the emulator."""
    report = context.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(Path(__file__).with_name("pytest.ini")), f"--junitxml={report}"]
    # The folder of the settings would otherwise hide tests/conftest.py.
    command += [f"--rootdir={_TESTS}", f"--confcutdir={_TESTS}"]
    # A folder of its own: at its end pytest would else delete what other sessions have left.
    command += [f"--basetemp={context.folder / 'tests'}"]
    # The emulator repeats every case of the codec's contract; the rehearsal needs a few.
    command += ["-k", "emulated and not case and not vector"] if context.rehearse else ["-m", "gpu"]
    command += [str(_TESTS / file) for file in files]
    platforms = "cpu" if context.rehearse else "cuda,cpu"
    environment = os.environ | {"JAX_PLATFORMS": platforms, "PYTHONFAULTHANDLER": "1"}
    # To a file: what the tests printed before a limit ended them is needed most.
    log = context.folder / "tests.log"
    with log.open("w") as output:
        tests = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = tests.wait(context.seconds_left())
        except subprocess.TimeoutExpired:
            # Not killed: its fault handler writes where each thread is.
            tests.send_signal(signal.SIGABRT)
            tests.wait()
            raise
        finally:
            print(log.read_text(errors="replace")[-20_000:], file=sys.stderr)
    if not report.exists():
        raise RuntimeError(f"pytest ended with {status}; see the log of this part")
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    if counts["failures"] or counts["errors"]:
        failed = [
            case.attrib["name"]
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        raise AssertionError(f"{len(failed)} of {counts['tests']} tests failed: {failed[:5]}")
    passed = counts["tests"] - counts["skipped"]
    if not passed:
        raise Skipped("no test could run here")
    return Result("tests", f"{passed} tests of {', '.join(files)} passed", [])


def test_torch(context: Context) -> Result:
    """Run the engine's tests of devices: copies, saves behind the training, laws, offload."""
    files = ("test_engine_device.py", "test_law_device.py", "test_offload.py")
    return run_tests(context, *(f"backends/torch/{file}" for file in files))


def save_under_each_shadow(context: Context) -> Result:
    """Train, save every step under each shadow, and restore every step bit for bit."""
    from benchmarks.states import leaves_of
    from benchmarks.workloads.recipe import recipe, tiny
    from benchmarks.workloads.torch_workloads import Workload, pretrained
    from deltacheck.backends.torch import Engine

    sizes: dict[str, Any] = {"width": 512, "layers": 8, "heads": 8, "pretrain_steps": 20}
    run = (
        tiny("sft", device=context.device)
        if context.rehearse
        else recipe("sft", device=context.device, sources=200, **sizes)
    )
    weights = pretrained(run)
    rows: list[list[Cell]] = []
    with accelerator(context):
        for shadow in SHADOWS:
            training, expected = Workload(run, weights), {}
            root = context.folder / f"shadow-{shadow}"
            with Engine(root, options=SaveOptions(shadow=shadow)) as engine:
                engine.guard(training.optimizer)
                engine.guard(training.model)
                stored = raw = 0
                for step in range(1, 7):
                    training.train_step()
                    expected[step] = {
                        path: leaf.detach().cpu().clone()
                        for path, leaf in leaves_of(training.state()).items()
                    }
                    # Not waited for: the next training step must not reach what is being read.
                    handle = engine.save(step, training.state())
                    if step == 6:
                        report = handle.result()
                        assert report is not None  # one save at a time
                        stored, raw = report.stored_bytes, report.raw_bytes
            with Engine(root) as engine:
                for step, leaves in expected.items():
                    restored = leaves_of(engine.restore(step))
                    require_equal(f"shadow={shadow!r}, step {step}", leaves, restored)
            rows.append([shadow, len(expected), raw, stored / raw])
    return Result(
        "the engine's shadows",
        "a save after each of 6 training steps; every step restored and compared bit for bit",
        [
            Table(
                "shadows",
                {
                    "shadow": "text",
                    "equal steps": "count",
                    "state": "bytes",
                    "last save stores": "ratio",
                },
                rows,
            )
        ],
    )


def require_equal(claim: str, expected: Any, restored: Any) -> None:
    """Raise if one bit of two states in host memory differs."""
    verdict = equality.compare(claim, expected, restored)
    if not verdict.holds:
        raise AssertionError(f"{claim}: {verdict.detail}")


STEPS = (
    Step("the CUDA module loads", import_module, seconds=5, checks_device=True),
    Step("the device's own test", check_device, needs=("torch",), seconds=5, checks_device=True),
    # What the engine does around the kernels is newer than the kernels.
    Step("tests of the engine on a device", test_torch, needs=("torch", "pytest"), seconds=40),
    Step("engine with each shadow", save_under_each_shadow, needs=("torch",), seconds=30),
)
