"""Runs trials in child processes, and keeps their results in files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

logger = logging.getLogger(__name__)
Stored = TypeVar("Stored")

TIME_LIMIT_SECONDS = 60.0


class Outcome(NamedTuple):
    passed: bool
    timed_out: bool = False
    output: bytes = b""


def run_trial(command: Sequence[str], variables: Mapping[str, str]) -> Outcome:
    """Run a command with more environment variables."""
    try:
        trial = subprocess.run(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIME_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome(passed=False, timed_out=True)
    return Outcome(trial.returncode == 0, output=trial.stdout)


def hash_of(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_results(path: Path, parse: Callable[..., Stored]) -> dict[str, Stored]:
    try:
        return {key: parse(value) for key, value in json.loads(path.read_text()).items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("cannot read %s (%s); the CPU trial runs again", path, error)
        return {}


def write_results(path: Path, values: Mapping[str, object]) -> None:
    text = json.dumps(values, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        logger.warning(
            "cannot write the result of the CPU trial to %s (%s); the next start runs it again",
            path,
            error,
        )
