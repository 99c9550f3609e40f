"""Home folders: those that paths begin with, and where Slipstream and the Hugging Face libraries
keep their files.

The environment is read at each call.
"""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | Path, setting: str = "") -> Path:
    """The path, with the home folder that a `~` at its beginning stands for. ValueError names it,
    and the setting that it came from, where there is no such user: a folder that is called `~name`
    was not meant.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{setting} {path}: the home folder that it begins with is not known here".lstrip()
        ) from error


def slipstream_home() -> Path:
    return _folder("SLIPSTREAM_HOME", Path("~/.cache/slipstream"))


def hugging_face_home() -> Path:
    return _folder("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def hugging_face_cache() -> Path:
    return _folder("HF_HUB_CACHE", hugging_face_home() / "hub")


def _folder(variable: str, default: Path) -> Path:
    return expand_home(os.environ.get(variable) or default, variable)
