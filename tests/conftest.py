"""Settings of every test: JAX on the processor, few threads, fixed hypothesis profiles, markers."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# After everything installed, so that only tests, benchmarks and examples come from the source tree.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.memory import memory_folder
from tests.support.s3_server import S3
from tests.support.waiting import SleepWatch

# Read by the frameworks when they are first imported, hence set before anything else can import
# them. Four host devices are what the sharding tests need. One thread a process: the tests run
# beside each other, and on two cores threads would only fight.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for the GPU tests: JAX_PLATFORMS=cuda,cpu
os.environ.setdefault("OMP_NUM_THREADS", "1")
assert "jax" not in sys.modules, (
    "a plugin imported jax before tests/conftest.py could set its flags"
)

# Tests write and sync thousands of small files: a quarter of their processor time is the disk's.
# Tests of power cuts bring a disk of their own. TMPDIR chooses another folder.
if (memory := memory_folder(room_bytes=4 << 30)) is not None:
    # pytest and its plugins may have asked for the folder already.
    tempfile.tempdir = os.environ.setdefault("TMPDIR", str(memory))

# No deadlines: a slow machine is not a failing test. The same examples every time, so that a
# failure is of the change at hand. HYPOTHESIS_PROFILE=soak takes new ones, for the long run.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", parent=settings.get_profile("default"), derandomize=False, max_examples=20_000
)
settings.register_profile(  # of tests/suites/soak.py
    "round", parent=settings.get_profile("default"), derandomize=False, max_examples=1000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def _gpu_count() -> int:
    """CUDA devices that the driver offers, asked without any framework."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return (
        count.value
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        else 0
    )


GPUS = _gpu_count()


def pytest_configure() -> None:
    """A bug that is planted on purpose (``planted.py``)."""
    if os.environ.get("DELTACHECK_PLANT"):
        from tests.suites.planted import plant_by_environment

        plant_by_environment()


def pytest_report_header() -> str:
    return f"GPUs: {GPUS}" + ("" if GPUS else " (tests marked 'gpu' are skipped)")


# Folders of tests that prove tools and documents rather than the product: `make test-tools`.
TOOLS = ("benchmarks", "docs", "evaluate", "gpu_kit", "report", "versions", "wheels")
# Parameters of the codec matrix: every codec with every case. `make test` takes one in THINNING.
MATRIX = ("case", "damage", "vector")
THINNING = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-tools`, and skip GPU tests if there is no GPU."""
    tests = Path(__file__).parent
    for item in items:
        if item.path.relative_to(tests).parts[0] in TOOLS:
            item.add_marker(pytest.mark.tools)
        if _matrix_index(item) % THINNING:
            item.add_marker(pytest.mark.matrix)
        if not GPUS and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and the driver offers none"))


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process: later collections need not visit them."""
    gc.collect()
    gc.freeze()


def _matrix_index(item: pytest.Item) -> int:
    """Return the number of a test's case within the codec matrix, 0 for all other tests."""
    call = getattr(item, "callspec", None)
    if call is None or "codec" not in item.path.name:
        return 0
    return next((call.indices[name] for name in MATRIX if name in call.indices), 0)


@pytest.fixture
def slow_encoder(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the encoder thread back before it captures a lazy leaf, until the event is set."""
    from deltacheck.save.job import save_job

    go = threading.Event()
    original = save_job.SaveJob.capture

    def capture(self: Any, sources: Any) -> None:
        # A copy: a thread that waits for the save may take leaves from the queue meanwhile.
        if any(source.lazy for source in list(sources)):
            assert go.wait(240)
        original(self, sources)

    monkeypatch.setattr(save_job.SaveJob, "capture", capture)
    return go


@pytest.fixture
def locked_out(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a thread has found the lock of a root's tags taken, and waits for it."""
    from deltacheck.store.files import local_storage

    watch = SleepWatch()
    monkeypatch.setattr(local_storage, "time", watch)
    return watch.began


@pytest.fixture
def forked_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are imported in processes that have imported the frameworks already."""
    from deltacheck.backends import isolated
    from tests.support.forked_imports import ForkedChild

    namespace = SimpleNamespace(Popen=ForkedChild, PIPE=None, DEVNULL=None)
    monkeypatch.setattr(isolated, "subprocess", namespace)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """The process group of this process alone."""
    import torch

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def encoder_settings_restored() -> Iterator[None]:
    """The encoder's threads and instruction set are the process's: as they were, once the test has
    ended.
    """
    from deltacheck import _native

    threads, kernels = _native.threads(), _native.instruction_set()
    yield
    _native.set_threads(threads)
    _native.use_instruction_set(kernels)


@pytest.fixture(scope="session")
def campaign() -> Iterator[Any]:
    """Zygotes for trials under the fault shim; skips where that cannot be built."""
    from tests.faults import shim
    from tests.faults.campaign import Campaign

    if shim.compiler() is None:
        pytest.skip("the fault shim needs gcc or cc")
    with Campaign() as made:
        yield made


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """One local S3 server for all tests of a process, with a bucket called ``bucket``."""
    server = S3()
    server.make_bucket("bucket")
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Return the server, and make it the one that ``s3://`` addresses name."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders of leases renew them, and others look at them, far more often than they must."""
    from deltacheck.store.lock import object_lease

    renew = object_lease._renew
    monkeypatch.setattr(
        object_lease, "_renew", lambda lease, released, every: renew(lease, released, 0.02)
    )
    monkeypatch.setattr(object_lease, "time", SleepWatch(longest_seconds=0.02))


@pytest.fixture
def azure_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let containers that ``az://`` addresses name from now on lie in the memory of obstore."""
    from obstore.store import MemoryStore

    from deltacheck.store.files import azure_bucket

    containers: dict[str, MemoryStore] = {}
    monkeypatch.setattr(
        azure_bucket,
        "AzureStore",
        lambda name, **options: containers.setdefault(name, MemoryStore()),
    )


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decoded bytes of the chunks that each restore reads from now on."""
    from deltacheck.restore import read

    counted: list[int] = []
    before = read.read_chunks

    def read_chunks(chains: Any, chunks: Any) -> Any:
        found = before(chains, chunks)
        counted.append(sum(values.nbytes for values in found.values()))
        return found

    monkeypatch.setattr(read, "read_chunks", read_chunks)
    return counted
