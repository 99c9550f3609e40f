"""Home folders: `~` in paths, and the caches of Slipstream and of the Hugging Face libraries.

Each call reads the environment again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def expand_home(path: str | Path, setting: str = "") -> Path:
    """Return the path with a leading `~` or `~user` replaced by that home folder.

    Raises ValueError with the path and its `setting` if there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{setting} {path}: the home folder that it begins with is not known here".lstrip()
        ) from error


def slipstream_home() -> Path:
    return _folder("SLIPSTREAM_HOME", Path("~/.cache/slipstream"))


def cpu_code_folder(home: Path) -> Path:
    """Return where compiled code of CPUs is kept. home: from `slipstream_home`"""
    return home / "cpu-code"


def packed_folder(home: Path) -> Path:
    """Return where packed weights are kept of engines in folders that cannot be written. home: from
    `slipstream_home`
    """
    return home / "packed"


def hugging_face_home() -> Path:
    return _folder("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def hugging_face_cache() -> Path:
    return _folder("HF_HUB_CACHE", hugging_face_home() / "hub")


def _folder(variable: str, default: Path) -> Path:
    return expand_home(os.environ.get(variable) or default, variable)


def no_space(folder: Path, variable: str) -> str:
    """Return the text of an error: the disk of a folder is full. `variable` names the folder."""
    found = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(found).free >> 20
    return (
        f"the disk of {folder} is full: {free} MiB are free; remove files there, or set {variable} "
        "to a folder on another disk"
    )
