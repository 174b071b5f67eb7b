"""``deltacheck run``: commands that know nothing of deltacheck are saved and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import deltacheck
from deltacheck.backends.launched.launch_options import STARTUP, TrainingRoots
from deltacheck.cli import main
from deltacheck.cli.launch import command_probe
from deltacheck.store.files.durability import Durability
from deltacheck.store.lock.lease import LocalLease
from deltacheck.store.roots.opening import create_store
from tests.support.paths import REPOSITORY
from tests.support.s3_server import FOREVER, S3, Fault

PYTHON = sys.executable
TOUCH = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"


class Done(NamedTuple):
    code: int
    out: str
    lines: list[str]  # of deltacheck, on stderr
    err: str


def environment(**more: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("DELTACHECK_")}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(REPOSITORY),
        **more,
    }


def run(*words: object, cwd: Path | None = None, **more: str) -> Done:
    command = [PYTHON, "-m", "deltacheck", "run", *map(str, words)]
    done = subprocess.run(
        command, env=environment(**more), cwd=cwd, capture_output=True, text=True, timeout=560
    )
    lines = [
        line.removeprefix("deltacheck run: ")
        for line in done.stderr.splitlines()
        if line.startswith("deltacheck")
    ]
    return Done(done.returncode, done.stdout, lines, done.stderr)


# --- the command and its process ------------------------------------------------------------------


def test_stdout_and_exit_status_are_those_of_the_command() -> None:
    done = run("--", PYTHON, "-c", "print('a line'); raise SystemExit(7)")
    assert (done.code, done.out) == (7, "a line\n")
    (line,) = done.lines
    assert "no training was seen" in line
    assert "transformers.Trainer.train" in line


def test_options_of_the_command_are_not_those_of_run() -> None:
    program = "import sys; print(sys.argv[1:])"
    done = run(PYTHON, "-c", program, "--json", "--root", "a")
    assert done.out == "['--json', '--root', 'a']\n"


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_command_is_started_again_as_often_as_asked(tmp_path: Path, restarts: int) -> None:
    program = (
        "import os, pathlib, signal; file = pathlib.Path('count');"
        " count = len(file.read_text()) if file.exists() else 0;"
        " file.write_text('x' * (count + 1));"
        " count < 2 and os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run("--restarts", restarts, "--", PYTHON, "-c", program, cwd=tmp_path)
    assert done.code == (137 if restarts == 1 else 0)
    assert (tmp_path / "count").read_text() == "x" * (restarts + 1)
    assert done.lines[0] == f"the command was ended by SIGKILL; restart 1 of {restarts}"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_goes_to_the_command_which_is_not_started_again(tmp_path: Path, name: str) -> None:
    program = (
        "import signal, sys; signal.signal(signal.Signals[sys.argv[1]], lambda *_: sys.exit(3));"
        " open('starts', 'a').write('x'); print('ready', flush=True); signal.pause()"
    )
    words = ["--restarts", "0" if name == "SIGUSR1" else "5", "--", PYTHON, "-c", program, name]
    # A shell lets its background jobs ignore SIGINT, and a test run may be one.
    heard = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
        " os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    with subprocess.Popen(
        [PYTHON, "-c", heard, "-m", "deltacheck", "run", *words],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[name])
        assert process.wait(timeout=240) == 3
    assert (tmp_path / "starts").read_text() == "x"


def test_a_launcher_that_is_killed_asks_its_command_to_end() -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')));"
        " print('ready', flush=True); signal.pause()"
    )
    command = [PYTHON, "-m", "deltacheck", "run", "--restarts", "1", "--", PYTHON, "-c", program]
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        try:
            # The pipe ends with the last process that has it.
            rest, _ = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (rest, process.returncode) == ("saved\n", -signal.SIGKILL)


def test_a_pipe_that_closes_ends_the_command_as_in_a_shell() -> None:
    program = (
        "import signal; print(signal.getsignal(signal.SIGPIPE), signal.pthread_sigmask(0, ()))"
    )
    bare = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=240)
    assert run("--", PYTHON, "-c", program).out == bare.stdout


def test_json_has_the_result_and_the_command_prints_elsewhere() -> None:
    done = run("--json", "--", PYTHON, "-c", "print('a line'); raise SystemExit(7)")
    assert done.code == 7
    assert "a line\n" in done.err
    document = json.loads(done.out)
    assert document.pop("command").startswith(f"{PYTHON} -c ")
    assert document == {"schema": 1, "exit_code": 7, "attempts": 1, "trainings": []}


# --- what is refused before the command is started ------------------------------------------------


def file_in_the_way(folder: Path) -> list[object]:
    (folder / "file").touch()
    return ["--root", folder / "file" / "root"]


def folder_of_others(folder: Path) -> list[object]:
    (folder / "others").mkdir()
    (folder / "others" / "notes.txt").touch()
    return ["--root", folder / "others"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (file_in_the_way, 3, "file is a file; give an empty or new directory"),
        (folder_of_others, 3, "others is not empty and not a deltacheck root"),
        (lambda _: ["--root", "s3:/bucket/run"], 2, "lost a slash"),
        (lambda _: ["--root", "ftp://host/run"], 2, "not ftp://"),
        (lambda _: ["--policy", "guess"], 2, "'guess' is no policy; choose from whole, exact"),
        (lambda _: ["--every", "0"], 2, "Invalid value for '--every'"),
    ],
)
def test_bad_options_are_refused_before_the_command_starts(
    tmp_path: Path, options: Any, code: int, message: str
) -> None:
    done = run(*options(tmp_path), "--", PYTHON, "-c", TOUCH, tmp_path / "started")
    assert done.code == code
    assert message in done.err
    assert not (tmp_path / "started").exists()


def test_a_root_of_another_writer_is_refused(tmp_path: Path) -> None:
    create_store(tmp_path / "root", durability=Durability.PROCESS)
    lease = LocalLease(tmp_path / "root")
    words = ["--", PYTHON, "-c", TOUCH, tmp_path / "started"]
    done = run("--root", tmp_path / "root", *words)
    lease.release()
    assert done.code == 5
    assert "is being written by process" in done.err
    assert not (tmp_path / "started").exists()
    # Of several launchers, only that of the first rank looks.
    assert run("--root", tmp_path / "root", *words, RANK="1").code == 0


def test_a_root_without_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    words = ["--root", str(tmp_path / "root"), "--", PYTHON, "-c", TOUCH, str(tmp_path / "started")]
    assert main(["run", *words]) == 5
    assert "has 1.0 MiB of free space" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


def test_a_bucket_that_cannot_be_written_safely_is_refused(tmp_path: Path, s3: S3) -> None:
    words = ["--", PYTHON, "-c", TOUCH, tmp_path / "started"]
    missing = run("--root", "s3://no-such-bucket/run", *words)
    assert missing.code == 5
    assert "no-such-bucket" in missing.err
    with s3.failing(Fault("unconditional", "/probe-", times=FOREVER)):
        careless = run("--root", "s3://bucket/careless", *words)
    assert careless.code == 5
    assert "conditional writes" in careless.err
    assert not (tmp_path / "started").exists()


def test_a_container_without_an_account_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    done = run("--root", "az://container/run", "--", PYTHON, "-c", TOUCH, tmp_path / "started")
    assert done.code == 5
    assert "AZURE_STORAGE_ACCOUNT_NAME" in done.err
    assert not (tmp_path / "started").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    done = run("--root", tmp_path / "closed" / "root", "--", PYTHON, "-c", "pass")
    assert done.code == 5
    assert "Permission denied" in done.err


def test_a_program_that_does_not_exist_is_refused() -> None:
    done = run("--", "no-such-program")
    assert done.code == 2
    assert "there is no program 'no-such-program'" in done.err


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_python_that_ignores_the_environment_is_refused(tmp_path: Path, flag: str) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{PYTHON} {flag}\nimport pathlib; pathlib.Path('started').touch()\n")
    script.chmod(0o700)
    for command in ([PYTHON, flag, "-c", "pass"], [script]):
        done = run("--", *command, cwd=tmp_path)
        assert done.code == 5
        assert f"it is started with {flag}" in done.err.replace("-E -I", "-I")
    assert not (tmp_path / "started").exists()


def test_a_python_that_is_reached_by_none_is_told_at_the_end() -> None:
    done = run("--", shutil.which("env"), "-i", PYTHON, "-c", "pass")
    assert done.code == 0
    (line,) = done.lines
    assert "no Python of the command has loaded the hook" in line


@pytest.mark.parametrize(
    ("first", "second", "interpreter"),
    [
        ("#!/opt/bin/python3.12 -I", "", ["/opt/bin/python3.12", "-I"]),
        ("#!/usr/bin/env python3", "", ["python3"]),
        ("#!/usr/bin/env -S python3 -E -X dev", "", ["python3", "-E", "-X", "dev"]),
        ("#!/bin/sh", '\'\'\'exec\' "/a b/python" "$0" "$@"', ["/a b/python"]),
        ("#!/bin/bash", "python train.py", None),
        ("\x7fELF", "", None),
    ],
)
def test_the_interpreter_of_a_script_is_found(
    tmp_path: Path, first: str, second: str, interpreter: list[str] | None
) -> None:
    (tmp_path / "script").write_text(f"{first}\n{second}\n")
    assert command_probe._interpreter(str(tmp_path / "script"), ["train.py"]) == interpreter


def test_options_of_python_end_at_the_program() -> None:
    options = command_probe._options(["-X", "dev", "-u", "-m", "torch.distributed.run", "-I"])
    assert options == ["-X", "dev", "-u"]


# --- the hook -------------------------------------------------------------------------------------


def test_the_hook_imports_nothing_and_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'imported'\n")
    program = (
        "import json, os, sys; print(json.dumps([sorted(sys.modules), sys.path,"
        " os.environ.get('HIDDEN'), getattr(sys.modules.get('sitecustomize'), '__file__', None)]))"
    )
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    bare = subprocess.run(
        [PYTHON, "-c", program],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert json.loads(run("--", PYTHON, "-c", program, PYTHONPATH=path).out) == json.loads(
        bare.stdout
    )


def test_without_another_sitecustomize_ours_stays_and_its_folder_goes() -> None:
    program = "import sys; print(sys.modules['sitecustomize'].__file__, sys.path)"
    done = run("--", PYTHON, "-c", program)
    file, _, path = done.out.partition(" ")
    assert Path(file).parent == STARTUP
    assert str(STARTUP) not in path


def test_a_failure_of_the_hidden_module_is_shown_as_without_the_hook(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import no_such_module_of_mine\n")
    done = run("--", PYTHON, "-c", "print('goes on')", PYTHONPATH=str(tmp_path))
    # Of the launcher and the command.
    assert "no_such_module_of_mine" in done.err
    assert done.out == "goes on\n"


def test_a_second_training_gets_a_root_of_its_own() -> None:
    roots = TrainingRoots()
    assert roots.root("a") == "a"
    # It has failed, and is tried again.
    assert roots.root("a") == "a"
    roots.end("a")
    assert roots.root("a") == "a-2"
    assert roots.root("a", continues=True) == "a"
    assert roots.root("b", continues=True) == "b"
    roots.end("a")
    assert roots.root("a") == "a-3"
    assert roots.root("a", continues=True) == "a-2"


# --- trainings ------------------------------------------------------------------------------------


def train(kind: str, folder: Path, name: str, *options: object, more: Any = (), **env: str) -> Done:
    """Run an unmodified script, which trains in ``folder / name``."""
    command = [PYTHON, "-m", f"tests.support.unmodified.{kind}_script"]
    words = [folder / name, folder / f"{name}.json", *more]
    return run(*options, "--", *command, *words, cwd=folder, **env)


def result(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@cache
def uninterrupted(kind: str, *more: object) -> Any:
    """Return the result of a training that nothing ends, which several tests compare with."""
    with tempfile.TemporaryDirectory() as folder:
        done = train(kind, Path(folder), "whole", more=more)
        assert done.code == 0, done.err[-3000:]
        return result(Path(folder), "whole")


# Each trains for up to half a minute, once it has imported its framework: one is enough for
# `make test`.
long = pytest.mark.tools
needs_transformers = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="transformers is not installed",
)


@needs_transformers
@pytest.mark.timeout(600)
def test_a_killed_trainer_continues_without_an_edit(tmp_path: Path) -> None:
    # Killed in the second training, in the step after its step 5.
    parts = train("hf", tmp_path, "parts", "--restarts", 1, more=[2], KILL_AT="15")
    assert parts.code == 0, parts.err[-3000:]
    assert result(tmp_path, "parts") == uninterrupted("hf", 2)
    folder = tmp_path / "parts"
    assert sorted(path.name for path in folder.iterdir()) == ["deltacheck", "deltacheck-2"]
    assert deltacheck.open(folder / "deltacheck-2").steps() == [2, 4, 6]
    first, second = folder / "deltacheck", folder / "deltacheck-2"
    lines = [line.partition(" (")[0] for line in parts.lines]
    # Which step was committed when the kill came.
    assert lines.pop(4) in {f"Trainer saves to {second}, continues from step {n}" for n in (2, 4)}
    assert lines == [
        f"Trainer saves to {first}, from step 0",
        f"Trainer saves to {second}, from step 0",
        "the command was ended by SIGKILL; restart 1 of 1",
        f"Trainer saves to {first}, continues from step 6",
        f"{first} has 3 steps, newest 6; new: 3",
        f"{second} has 3 steps, newest 6; new: 3",
    ]


@needs_transformers
@long
@pytest.mark.timeout(600)
def test_a_trainer_saves_on_a_signal_and_ends_by_it(tmp_path: Path) -> None:
    ended = train("hf", tmp_path, "parts", more=[1], KILL_AT="2", KILL_BY="SIGUSR1")
    assert ended.code == 128 + signal.SIGUSR1, ended.err[-3000:]
    root = tmp_path / "parts" / "deltacheck"
    # Step 3 was under way.
    assert deltacheck.open(root).steps() == [2, 3]
    assert "SIGUSR1: the training ends, step 3 is saved" in ended.err
    again = train("hf", tmp_path, "parts", more=[1])
    assert again.lines[0] == f"Trainer saves to {root}, continues from step 3"
    assert result(tmp_path, "parts") == uninterrupted("hf", 1)


@needs_transformers
@long
@pytest.mark.timeout(600)
def test_a_signal_reaches_a_trainer_behind_a_wrapper_that_dies_of_it(tmp_path: Path) -> None:
    script = [PYTHON, "-m", "tests.support.unmodified.hf_script", "run", "run.json", "1"]
    wrapper = ["sh", "-c", '"$@"; exit 0', "sh", *script]
    launcher = [PYTHON, "-m", "deltacheck", "run", "--restarts", "3", "--", *wrapper]
    done = subprocess.run(
        ["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh", *launcher],
        env=environment(KILL_AT="2", KILL_BY="launcher"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-3000:]
    # The launcher has waited for the save.
    assert deltacheck.open(tmp_path / "run" / "deltacheck").steps() == [2, 3]
    assert "new: 2 (" in done.stderr
    assert "restart" not in done.stderr


@needs_transformers
@long
@pytest.mark.timeout(600)
def test_what_is_not_saved_is_told(tmp_path: Path) -> None:
    program = """
from tests.support.trainer_child import Path, Trainer, train, trainer
train(Path("own"), max_steps=2)
class Alone(Trainer):
    def train(self):
        pass
trainer(Path("alone"), kind=Alone).train()
trainer(Path("none"), max_steps=1, save_strategy="no").train()
"""
    done = run("--", PYTHON, "-c", program, cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
    root = tmp_path / "none" / "deltacheck"
    assert done.lines == [
        "Alone is not saved, because Alone.train does not call Trainer.train; save with an Engine",
        f"Trainer saves to {root}, from step 0",
        "save_strategy is 'no', so nothing is saved: add --every N, or change it",
        f"{root} has 0 steps; new: 0 (0 B)",
        "Trainer has checkpoints of deltacheck, or a plugin for them, by itself",
    ]
    assert deltacheck.open(tmp_path / "own" / "deltacheck").steps() == [2]


@needs_transformers
@long
@pytest.mark.timeout(600)
def test_options_reach_the_trainer(tmp_path: Path) -> None:
    root = tmp_path / "root"
    options = ["--root", root, "--policy", "auto", "--every", 1, "--keep", 2, "--json"]
    done = train("hf", tmp_path, "run", *options, more=[1])
    assert done.code == 0, done.err[-3000:]
    (training,) = json.loads(done.out)["trainings"]
    assert training.pop("new_bytes") > 0
    assert training == {
        "trainer": "Trainer",
        "root": str(root),
        "first_step": 0,
        "newest_step": 6,
        "steps": 2,
        "new_steps": [5, 6],
    }
    assert deltacheck.open(root).manifest().stage
    # The same from the environment, and the root is named before the start.
    again = train("hf", tmp_path, "run", more=[1], DELTACHECK_ROOT=str(root))
    assert again.lines[0] == f"root {root}, newest step 6"
    assert again.lines[1] == f"Trainer saves to {root}, continues from step 6"


@pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed")
@long
@pytest.mark.timeout(600)
def test_a_killed_lightning_trainer_continues_without_an_edit(tmp_path: Path) -> None:
    parts = train("lightning", tmp_path, "parts", "--restarts", 1, KILL_AT="7")
    assert parts.code == 0, parts.err[-3000:]
    assert result(tmp_path, "parts") == uninterrupted("lightning")
    root = tmp_path / "parts" / "deltacheck"
    assert parts.lines[0] == f"Trainer saves to {root}, from step 0"
    assert parts.lines[2] in {f"Trainer saves to {root}, continues from step {n}" for n in (3, 6)}


@pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed")
@long
@pytest.mark.timeout(600)
def test_lightning_saves_every_so_many_steps_and_scripts_load_the_files(tmp_path: Path) -> None:
    options = ["--root", tmp_path / "root", "--every", 2, "--keep", 2, "--restarts", 1]
    # Its own checkpoints have weights only.
    parts = train("lightning", tmp_path, "parts", *options, KILL_AT="7", WEIGHTS_ONLY="1")
    assert parts.code == 0, parts.err[-3000:]
    assert result(tmp_path, "parts") == uninterrupted("lightning")
    # Saves of steps, of epochs, and of the script.
    files = {path.name for path in (tmp_path / "root-files").iterdir()}
    assert {"epoch=2-step=9.ckpt", "epoch=3-step=12.ckpt", "step=10.ckpt", "step=12.ckpt"} <= files
    # A removal that was under way when the kill came is not done again.
    assert "step=8.ckpt" not in files


@needs_transformers
@long
@pytest.mark.timeout(600)
def test_a_killed_accelerate_loop_continues_without_an_edit(tmp_path: Path) -> None:
    parts = train("accelerate", tmp_path, "parts", "--restarts", 1, KILL_AT="5")
    assert parts.code == 0, parts.err[-3000:]
    whole = uninterrupted("accelerate")
    assert result(tmp_path, "parts") == {**whole, "begin": 4}
    assert whole["begin"] == 0
    root = tmp_path / "parts.deltacheck"
    assert deltacheck.open(root).steps() == [2, 4, 6, 8]
    assert sorted(path.name for path in (tmp_path / "parts" / "step_8").iterdir()) == [
        "deltacheck.json"
    ]


@pytest.mark.parametrize(
    ("kind", "package", "more", "kill_at"),
    [("hf", "transformers", [1], "5"), ("lightning", "lightning", [], "7")],
)
@long
@pytest.mark.timeout(600)
def test_another_machine_continues_from_a_bucket(
    tmp_path: Path, s3: S3, kind: str, package: str, more: list[object], kill_at: str
) -> None:
    pytest.importorskip(package)
    root = f"s3://bucket/run-{kind}"
    killed = train(kind, tmp_path, "parts", "--root", root, more=more, KILL_AT=kill_at)
    assert killed.code == 128 + signal.SIGKILL, killed.err[-3000:]
    newest = deltacheck.open(root).latest_step()
    shutil.rmtree(tmp_path / "parts")
    again = train(kind, tmp_path, "parts", "--root", root, more=more, KILL_AT=kill_at)
    assert again.code == 0, again.err[-3000:]
    assert f"continues from step {newest}" in again.lines[1]
    assert result(tmp_path, "parts") == uninterrupted(kind, *more)
