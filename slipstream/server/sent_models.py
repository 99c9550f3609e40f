"""Folders of models whose files came with a client's load request.

A folder is temporary: it lies in a directory of its own, which only this user may read, and is
removed when the model is unloaded or replaced.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from slipstream.repository.config import CONFIG_NAME
from slipstream.server.kserve.errors import Code, InferenceError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
NOT_ALLOWED = (
    "the files of a load request may be code, which this server does not run; start it with "
    "--allow-python-models, or load the model without files"
)


def refuse_files(name: str) -> InferenceError:
    """Return the error for files where code of clients is not allowed."""
    return InferenceError(f"failed to load '{name}': {NOT_ALLOWED}", Code.UNSUPPORTED)


def write_folder(name: str, files: Mapping[PurePosixPath, bytes]) -> Path:
    """Write the folder of a model and return it. Raises InferenceError.

    The paths are relative and do not leave the folder: `repository_control.read_files` checks them.
    """
    if not _NAME.fullmatch(name):
        raise InferenceError(
            f"failed to load '{name}': a model's name may hold letters, digits, '.', '_' and '-'"
        )
    folder = Path(tempfile.mkdtemp(prefix="slipstream-model-")) / name
    try:
        folder.mkdir()
        for path, content in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        (folder / CONFIG_NAME).touch()  # marks a model; its configuration came with the request
    except OSError as error:
        remove_folder(folder)
        text = f"the files of model '{name}' cannot be written: {error.strerror}"
        raise InferenceError(text, Code.INTERNAL) from error
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder of `write_folder`."""
    shutil.rmtree(folder.parent, ignore_errors=True)
