"""Write a folder that appears complete or not at all, even if its writer is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_STAGING_PREFIX = ".slipstream-writing-"
_LOCK_NAME = ".lock"


@contextlib.contextmanager
def whole_folder(output: Path, marker: str, obsolete: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a staging folder to write into. At the end its files become `output`.

    A new folder appears by one rename. An existing folder may be a mount or hold other files, so
    its files are replaced one by one. `marker` is the file that readers look for first: it is
    removed first and written last. `obsolete` names files of an earlier writer to delete.
    """
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"{output} exists and is not a folder")
    place = output if output.is_dir() else output.parent
    place.mkdir(parents=True, exist_ok=True)
    remove_abandoned(place)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=place))
    lock = (staging / _LOCK_NAME).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield staging
        (staging / _LOCK_NAME).unlink()
        staging.chmod(0o755)  # mkdtemp creates folders that only one user can read
        _publish(staging, output, marker, obsolete)
    finally:
        lock.close()
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, output: Path, marker: str, obsolete: Iterable[str]) -> None:
    if not output.exists():
        os.rename(staging, output)
        _sync(output.parent)
        return
    (output / marker).unlink(missing_ok=True)
    for name in obsolete:
        if Path(name).name == name:
            (output / name).unlink(missing_ok=True)
    names = sorted((path.name for path in staging.iterdir()), key=lambda name: name == marker)
    for name in names:
        os.replace(staging / name, output / name)
    _sync(output)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(place: Path) -> None:
    """Remove staging folders whose writer died. The system released its lock."""
    for folder in place.glob(f"{_STAGING_PREFIX}*"):
        try:
            with (folder / _LOCK_NAME).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue  # the folder is being published or was just created
        except BlockingIOError:
            continue  # the writer is still running
