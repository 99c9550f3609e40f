"""Where Slipstream and the Hugging Face libraries keep their files, read from the environment at each call."""

from __future__ import annotations

import os
from pathlib import Path


def slipstream_home() -> Path:
    return _folder("SLIPSTREAM_HOME", Path("~/.cache/slipstream"))


def hugging_face_home() -> Path:
    return _folder("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def hugging_face_cache() -> Path:
    return _folder("HF_HUB_CACHE", hugging_face_home() / "hub")


def _folder(variable: str, default: Path) -> Path:
    value = os.environ.get(variable)
    return (Path(value) if value else default).expanduser()
