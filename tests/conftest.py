"""Settings that must be there before any test imports torch, and what is done once for all tests."""

import gc
import os
import shutil
import tempfile

import pytest

# torch's OpenMP threads wait for each other by spinning. Where tests share their cores with
# anything else, a thread spins while the one it waits for cannot run, and a test takes four times
# as long. The engine process sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Hundreds of processes are started by tests. Where Python was told to leave no bytecode beside the
# sources, each would compile the package anew: theirs is kept in a folder of its own, as long as
# the tests run.
BYTECODE = (
    tempfile.mkdtemp(prefix="bytecode-") if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") else ""
)
if BYTECODE:
    os.environ["PYTHONPYCACHEPREFIX"] = BYTECODE

# Python's search for garbage goes through all that torch, transformers and the tests themselves
# have made, a fifth of a second each time. None of it is garbage before the end.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def log_to_stderr() -> None:
    """Let servers that run inside the test process log as their command does."""
    from slipstream.server.log.output import configure_log

    configure_log()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # else libraries that look at their own objects in the end would report them as lost
    gc.unfreeze()
    if BYTECODE:
        shutil.rmtree(BYTECODE, ignore_errors=True)
