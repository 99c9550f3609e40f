"""Settings that must be made before torch is imported, and set-up for all tests."""

import gc
import os
import shutil
import signal
import tempfile

import pytest

# OpenMP threads of torch spin while they wait for each other. On a busy machine a thread spins while
# the other one cannot run, and tests take four times as long. The engine process has the same
# setting.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A shell starts background jobs with SIGINT ignored, and their child processes inherit it. Tests
# interrupt the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny models and Triton's interpreter are slower with several threads. Engines choose their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's interpreter multiplies with numpy. Some kernels of its BLAS add in an order that depends on
# the number of rows, and tests compare bits between batches. This one does not.
os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

# The tests start hundreds of processes. If Python writes no bytecode next to the sources, each
# process compiles the package again. The bytecode is therefore kept in a temporary folder.
BYTECODE = (
    tempfile.mkdtemp(prefix="bytecode-") if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") else ""
)
if BYTECODE:
    os.environ["PYTHONPYCACHEPREFIX"] = BYTECODE

# Each garbage collection scans all objects of torch, transformers and the tests, which takes 0.2 s.
# Objects that exist after collection of the tests are never garbage.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def log_to_stderr() -> None:
    """Configure the log of servers inside the test process as their command does."""
    from slipstream.server.log.output import configure_log

    configure_log()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes: some for the whole default run, 0 (this process) for selected
    tests. Tests of a GPU share its memory, and single tests start faster without others.
    """
    selected = config.option.file_or_dir or not config.option.markexpr.startswith("not slow")
    cores = len(os.sched_getaffinity(0))
    return 0 if selected or cores == 1 else min(cores, 4)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # libraries that check their objects at exit would report frozen ones as leaked
    gc.unfreeze()
    if BYTECODE:
        shutil.rmtree(BYTECODE, ignore_errors=True)
