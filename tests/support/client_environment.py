"""Virtual environments for client libraries that the tests' own environment does not have."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "SLIPSTREAM_CLIENT_ENVIRONMENTS"  # folder of the environments


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of an environment with these requirements.

    It is built from PyPI at the first call, and kept for later test runs: a change of the
    requirements builds another one.
    """
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    folder = _folder() / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test runs at the same time build it once
        if not (folder / "complete").exists():
            _build(folder, requirements)
    return folder / "bin" / "python"


def _folder() -> Path:
    if given := os.environ.get(VARIABLE):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "slipstream" / "client-environments"


def _build(folder: Path, requirements: Sequence[str]) -> None:
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements]
    built = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if built.returncode:
        raise RuntimeError(f"pip install {' '.join(requirements)} failed:\n{built.stderr[-4000:]}")
    (folder / "complete").write_text("\n".join(requirements))


def installed_versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages in an environment."""
    code = "import sys, importlib.metadata as m; [print(m.version(p)) for p in sys.argv[1:]]"
    found = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(zip(packages, found.stdout.split(), strict=True))
