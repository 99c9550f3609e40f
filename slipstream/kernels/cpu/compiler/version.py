"""The version of LLVM, without loading it."""

from __future__ import annotations

import importlib.metadata


def llvm_version() -> str:
    return f"llvmlite {importlib.metadata.version('llvmlite')}"
