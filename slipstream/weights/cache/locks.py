"""Locks between processes, by files. The system releases them when a process ends, however it ends.

`locked` lets one command at a time do something. `hold` marks a file as used for as long as the
process lives, and `is_held` asks for such a mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slipstream.weights.home import slipstream_home


@contextmanager
def locked(what: str | Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock named `what`: no two processes run blocks with the same name at the same time.

    `on_wait` is called if this process has to wait.
    """
    folder = slipstream_home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(what)).hexdigest()[:16]
    path = folder / f"{name}.lock"
    file = _lock_file(path, on_wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: see below
        file.close()


def _lock_file(path: Path, on_wait: Callable[[], None]) -> BinaryIO:
    """Return the locked file. The process that had it before has removed it from the folder, so
    that it has to be opened again.
    """
    while True:
        file = path.open("ab")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def hold(path: Path) -> BinaryIO | None:
    """Mark a file as used until the returned file is closed or the process ends.

    Returns None where the file system has no locks, or the file is gone: the mark informs other
    commands, and nothing here depends on it.
    """
    try:
        file = path.open("rb")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def is_held(path: Path) -> bool:
    """Return whether a running process has marked this file as used."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no such file, or a file system without locks
    return False
