"""One target under atheris, which keeps inputs that reach new code.

python tests/gates/fuzz_coverage.py TARGET RUNS SECONDS CORPUS
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_START_SECONDS = 240  # until all imports are instrumented, on a busy machine
TESTS = Path(__file__).parents[1]


class Guided(NamedTuple):
    inputs: int
    problem: str


def is_installed() -> bool:
    return importlib.util.find_spec("atheris") is not None


def run_guided(
    name: str, seeds: tuple[bytes, ...], folder: Path, runs: int, seconds: int
) -> Guided:
    """Run a target in a process of its own."""
    corpus = folder / "corpus" / name.replace(" ", "-")
    corpus.mkdir(parents=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)
    command = [
        sys.executable,
        "-m",
        "gates.fuzz_coverage",
        name,
        str(runs),
        str(seconds),
        str(corpus),
    ]
    path = os.pathsep.join((str(TESTS.parent), str(TESTS), str(TESTS / "support")))
    log = folder / f"{corpus.name}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=written,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    output = log.read_text(errors="replace")
    done = re.search(r"Done (\d+) runs", output)
    if done and "ERROR" not in output:
        return Guided(int(done[1]), "")
    lines = output.splitlines()
    reasons = [line for line in lines if "Error" in line or "ERROR" in line]
    return Guided(0, (reasons or lines or ["no output"])[-1][:200])


def main() -> None:
    import atheris

    name, runs, seconds, corpus = sys.argv[1:]
    with atheris.instrument_imports(include=["slipstream"]):
        from gates.fuzz_targets import targets
    (target,) = [target for target in targets(Path(tempfile.mkdtemp())) if target.name == name]

    def try_one(data: bytes) -> None:
        target.read(data)

    options = [f"-runs={runs}", f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *options, "-max_len=65536", corpus], try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
