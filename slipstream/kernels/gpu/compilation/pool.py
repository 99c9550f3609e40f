"""Compiles the kernels of a model in parallel processes, before the model first runs.

Without it, Triton compiles kernels one after the other when they are first launched. No torch and
no Triton here: the processes start first, and load both while the engine loads its weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.kernels.gpu.compilation.jobs import CompileJob

logger = logging.getLogger(__name__)

_WORKER = "slipstream.kernels.gpu.compilation.worker"
_MAX_PROCESSES = 16
_MIN_CORES = 3  # with fewer, a second process does not pay for its start
_GPUS = Path("/proc/driver/nvidia/gpus")


class CompilePool:
    """Processes that compile kernels into Triton's cache on disk."""

    def __init__(self, processes: int, marker: Path | None = None) -> None:
        """marker: a file that is written once all kernels are compiled"""
        self.jobs: list[CompileJob] = []
        self._marker = marker
        # One thread each: libraries must not start threads before the processes are forked.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._worker = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._alive = True

    def submit(self, job: CompileJob) -> None:
        """Compile a kernel in another process."""
        self.jobs.append(job)
        self._write(job.to_json())

    def _write(self, line: str) -> None:
        assert self._worker.stdin is not None
        try:
            self._worker.stdin.write(line + "\n")
            self._worker.stdin.flush()
        except OSError:  # `wait` reports it
            self._alive = False

    def wait(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Wait until all jobs have ended, then end the processes.

        A kernel that failed here is compiled when it is first launched, and fails there if it must.
        """
        assert self._worker.stdout is not None
        total = len(self.jobs)
        done = failed = 0
        while done < total and self._alive:
            line = self._worker.stdout.readline()
            if not line:
                self._alive = False
            elif isinstance(ended := json.loads(line), list):
                number, _, error = ended
                done += 1
                failed += bool(error)
                if error:
                    kernel = self.jobs[number].kernel
                    logger.warning("the kernel %s could not be compiled ahead: %s", kernel, error)
                progress(done, total)
        if done < total:
            logger.warning(
                "the processes that compile kernels ended: %d of %d kernels are compiled one after "
                "the other",
                total - done,
                total,
            )
        elif not failed and self._marker is not None:
            self._write_marker(self._marker)
        self.close()

    def _write_marker(self, marker: Path) -> None:
        try:
            marker.touch()
        except OSError as error:
            logger.warning("%s cannot be written: %s", marker, error.strerror)

    def close(self) -> None:
        """End the processes, if they have not ended."""
        if self._worker.returncode is not None:
            return
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        try:
            self._worker.stdin.close()
        except OSError:  # what was buffered has no reader
            self._alive = False
        self._worker.stdout.close()
        self._worker.wait()


def start_pool(identity: str, cores: int) -> CompilePool | None:
    """Start a pool, or return None if it would not help: with few cores, or if the same kernels
    were compiled before.

    identity: text on which the kernels depend, such as the model's shape
    cores: number of cores that this process may use
    """
    try:
        compiler = version("triton")
    except PackageNotFoundError:
        return None  # the engine reports it
    folder = prepare_cache_folder()
    marker = folder / f"slipstream-{_digest(identity + compiler)}.compiled"
    if cores < _MIN_CORES or marker.exists():
        return None
    return CompilePool(min(_MAX_PROCESSES, cores - 1), marker)


def prepare_cache_folder() -> Path:
    """Return the folder of Triton's cache. If it cannot be written, a temporary one takes its place
    in this process and those that it starts.
    """
    home = os.environ.get("TRITON_HOME") or str(Path.home())
    wanted = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    folder = wanted
    if not _is_writable(wanted):
        folder = _temporary_folder()
        logger.warning(
            "compiled kernels are stored in %s, because %s cannot be written: set TRITON_CACHE_DIR "
            "to a folder that stays",
            folder,
            wanted,
        )
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return folder


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _temporary_folder() -> Path:
    """Return a folder that only this user can write, the same one at the next start."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="slipstream-kernels-"))
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if own and not found.st_mode & 0o077 and _is_writable(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix="slipstream-kernels-"))


def _digest(identity: str) -> str:
    """Return a hash of all that decides which kernels are needed and how they are compiled."""
    digest = hashlib.sha256(identity.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    for path in sorted(_GPUS.glob("*/information")):
        model, _, _ = path.read_bytes().partition(b"\n")
        digest.update(model)
    return digest.hexdigest()[:32]
