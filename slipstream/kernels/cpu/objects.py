"""Compiled code: read from the cache or compiled now, and loaded into this process.

An object serves every model. Its file is named after a hash of the source of this folder, the
instruction level and the version of LLVM, so that a stale file is never loaded. The first line of a
file is the hash of the rest: a damaged file is compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.kernels.cpu.link import Image

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # phase, steps done, steps in all
PHASE = "compiling CPU kernels"
_HASH_BYTES = 64  # of a hexadecimal SHA-256


@dataclass(frozen=True)
class Code:
    """Machine code in this process."""

    level: Level
    serve: int  # addresses of the functions that code/step.py exports
    launch: int
    image: Image  # keeps the code in memory


_loaded: dict[str, Code] = {}  # by the level's name; a process loads a level once


def load_code(
    level: Level, folder: Path | None, progress: Progress = lambda phase, done, total: None
) -> Code:
    """Return the code for an instruction level, compiled if the cache in `folder` has none.

    folder: None: there is no cache
    """
    if level.name not in _loaded:
        data = None if folder is None else _read(folder / _file_name(level))
        if data is None:
            progress(PHASE, 0, 1)
            data = _compile(level)
            progress(PHASE, 1, 1)
            if folder is not None:
                keep_code(level, data, folder)
        install_code(level, data)
    return _loaded[level.name]


def read_or_compile(level: Level, folder: Path) -> tuple[bytes, bool]:
    """Return the code for an instruction level, and whether it was compiled now."""
    data = _read(folder / _file_name(level))
    return (_compile(level), True) if data is None else (data, False)


def has_code(level: Level, folder: Path) -> bool:
    """Return whether the cache has a file for an instruction level."""
    return (folder / _file_name(level)).exists()


def install_code(level: Level, data: bytes) -> Code:
    """Load code into this process."""
    image = Image(data)
    _loaded[level.name] = Code(level, image.address("serve"), image.address("launch"), image)
    return _loaded[level.name]


def _compile(level: Level) -> bytes:
    # imported when needed: writing and compiling the code takes memory that a cached start saves
    from slipstream.kernels.cpu.code.step import write_module
    from slipstream.kernels.cpu.compiler.build import compile_object

    return compile_object(write_module(level), level)


def function_of(address: int) -> Callable[[int], None]:
    """Return a function of the code, which releases the interpreter's lock while it runs."""
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


def _file_name(level: Level) -> str:
    return f"{level.name}-{source_hash()[:24]}.o"


@cache
def source_hash() -> str:
    """Return a hash of everything that the code follows from, but for the instruction level."""
    from slipstream.kernels.cpu.compiler.version import llvm_version

    digest = hashlib.sha256(f"{llvm_version()} {platform.machine()}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """Return the object in a file; None if it cannot be read or is damaged."""
    try:
        data = path.read_bytes()
    except OSError:  # what is wrong is reported when the file cannot be written
        return None
    code = data[_HASH_BYTES:]
    if hashlib.sha256(code).hexdigest().encode() != data[:_HASH_BYTES]:
        logger.warning("%s is damaged; the CPU kernels are compiled again", path)
        return None
    return code


def keep_code(level: Level, code: bytes, folder: Path) -> bool:
    """Write code to the cache. Return whether that was possible."""
    path = folder / _file_name(level)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(code).hexdigest().encode() + code)
        temporary.replace(path)
    except OSError as error:
        logger.warning(
            "cannot keep the compiled CPU kernels in %s (%s); each start compiles them again, "
            "unless SLIPSTREAM_HOME is a folder that can be written",
            folder,
            error,
        )
        return False
    return True
