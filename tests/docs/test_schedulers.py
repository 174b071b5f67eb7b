"""The files for Slurm and Kubernetes of docs/how-to/preemption.md work, with stand-ins for the
commands of a cluster and for the training.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.tools
PAGE = (REPOSITORY / "docs" / "how-to" / "preemption.md").read_text()
TRAINING = f"""#!{sys.executable}
import os, signal, sys
status = os.environ["STATUS"]
if status.isdigit():
    sys.exit(int(status))
with open("arguments", "w") as file:
    file.write(" ".join(sys.argv[1:]))
# The launcher passes the signal on.
os.kill(os.getppid(), signal.Signals[status])
signal.pause()
"""


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert isinstance(text, str)
    return text


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins for srun, scontrol and torchrun."""
    programs = {
        "torchrun": TRAINING,
        "srun": '#!/bin/sh\nexec "$@"\n',
        "scontrol": '#!/bin/sh\necho "$@" > requeued\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    path = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(REPOSITORY),
        "SLURM_JOB_ID": "77",
        "HOME": str(tmp_path),
    }


def run(command: list[str], folder: Path, environment: dict[str, str], status: str) -> int:
    environment = environment | {"STATUS": status}
    return subprocess.run(command, cwd=folder, env=environment, timeout=240).returncode


@pytest.mark.parametrize(
    ("status", "code", "requeued"), [("SIGUSR1", 138, True), ("0", 0, False), ("3", 3, False)]
)
def test_the_slurm_script_requeues_a_job_that_was_asked_to_end(
    tmp_path: Path, cluster: dict[str, str], status: str, code: int, requeued: bool
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(block("bash"))
    assert run(["bash", str(script)], tmp_path, cluster, status) == code
    file = tmp_path / "requeued"
    assert (file.read_text() if file.exists() else "") == ("requeue 77\n" if requeued else "")


def test_the_container_of_the_kubernetes_job_ends_by_sigterm(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    yaml = pytest.importorskip("yaml")
    job: Any = yaml.safe_load(block("yaml"))
    pod = job["spec"]["template"]["spec"]
    assert (job["kind"], pod["restartPolicy"]) == ("Job", "OnFailure")
    (container,) = pod["containers"]
    command = [*container["command"], *container["args"]]
    assert run(command, tmp_path, cluster, "SIGTERM") == 128 + signal.SIGTERM
    assert (tmp_path / "arguments").read_text() == " ".join(container["args"][1:])
