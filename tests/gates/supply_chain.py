"""What is installed and what is built: a bill of materials, known vulnerabilities, the same wheel twice."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from gates.table import ROOT, Row

PINNED = ROOT / ".ci" / "tested.txt"
_EPOCH = "1700000000"  # seconds; the time of all files in the wheel
_SECONDS = 240
_NAME = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)$")
_UNREACHABLE = ("ConnectionError", "Max retries", "Temporary failure", "ServiceError", "timed out")


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    """`long`: also builds wheels, and asks a database for known vulnerabilities."""
    rows.append(_pinned())
    rows.append(await asyncio.to_thread(_bill, folder))
    if long:
        rows.append(await asyncio.to_thread(_same_wheel, folder))
        rows.append(await asyncio.to_thread(_audit))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


def read_pinned(text: str) -> dict[str, str]:
    """Return the versions of a pinned environment by name."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    matches = [(line, _NAME.match(line)) for line in lines if line]
    wrong = [line for line, match in matches if match is None]
    if wrong:
        raise ValueError(f"not a pinned version: {wrong[0]}")
    return {_normal(match["name"]): match["version"] for _, match in matches if match}


def _declared() -> set[str]:
    """Return the dependencies of the product and of its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in ("guided", "otel", "test"):
        lines += project["optional-dependencies"][extra]
    names = {_normal(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines}
    return names - {"slipstream"}


def _pinned() -> Row:
    """Each dependency has one tested version, which the declared range allows."""
    pinned = read_pinned(PINNED.read_text())
    missing = sorted(_declared() - set(pinned))
    installed = {
        _normal(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions()
    }
    other = [
        name
        for name, version in pinned.items()
        if name in installed and installed[name].partition("+")[0] != version
    ]
    text = f"{len(pinned)} versions pinned, {len(missing)} dependencies are not"
    text += f", {len(other)} installed in another version"
    if missing or other:
        text += f": {', '.join(missing + other)}"
    return Row("pinned test environment (.ci/tested.txt)", text, not missing and not other)


def _bill(folder: Path) -> Row:
    case = "bill of materials (CycloneDX)"
    if importlib.util.find_spec("cyclonedx_py") is None:
        return Row(case, "not installed: pip install cyclonedx-bom", None)
    file = folder / "bill.json"
    options = ("--output-format", "JSON", "--output-file", str(file), "--validate")
    found = _run(sys.executable, "-m", "cyclonedx_py", "environment", *options)
    if found.returncode:
        return Row(case, f"failed: {found.stderr.strip().splitlines()[-1:]}", False)
    parts = json.loads(file.read_text())["components"]
    listed = {_normal(part["name"]): part for part in parts}
    missing = sorted(name for name in _required() if name not in listed)
    without = sorted(name for name, part in listed.items() if not part.get("version"))
    text = f"{len(parts)} components, valid"
    if missing or without:
        text += f"; missing: {', '.join(missing)}; without a version: {', '.join(without)}"
    return Row(case, text, not missing and not without and bool(parts))


def _required() -> set[str]:
    """Return the dependencies that are installed for this platform."""
    installed = {_normal(one.metadata["Name"]) for one in importlib.metadata.distributions()}
    return _declared() & installed


def _same_wheel(folder: Path) -> Row:
    """Build from two copies of the tracked files, in different folders and times."""
    sums = []
    for name in ("first", "second of another length"):
        place = folder / name
        place.mkdir()
        _copy_tracked(place)
        found = _run(
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--quiet", "--wheel-dir", str(place / "wheel"), str(place)),
            SOURCE_DATE_EPOCH=_EPOCH,
            PIP_NO_CACHE_DIR="1",
        )
        if found.returncode:
            return Row("wheel built twice", f"failed: {found.stderr.strip()[-300:]}", False)
        (wheel,) = (place / "wheel").glob("*.whl")
        sums.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    same = sums[0] == sums[1]
    found_text = f"SHA-256 {sums[0][:16]}… both times" if same else "the files differ"
    return Row("wheel built twice", found_text, same)


def _copy_tracked(place: Path) -> None:
    """Copy what the version control system has, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    archive = place / "tracked.tar"
    with tarfile.open(archive, "w") as tar:
        for name in filter(None, listed):
            if (ROOT / name.decode()).exists():
                tar.add(ROOT / name.decode(), name.decode())
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    archive.unlink()


def _audit() -> Row:
    case = "known vulnerabilities (pip-audit)"
    if importlib.util.find_spec("pip_audit") is None:
        return Row(case, "not installed: pip install pip-audit", None)
    options = ("--format", "json", "--progress-spinner", "off", "--skip-editable")
    found = _run(sys.executable, "-m", "pip_audit", *options)
    try:
        parts = json.loads(found.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = found.stderr.strip()
        if any(word in reason for word in _UNREACHABLE):
            return Row(case, "the database cannot be reached", None)
        return Row(case, f"failed: {reason[-200:]}", False)
    asked = [part for part in parts if "skip_reason" not in part]
    if not asked:
        return Row(case, "the database knows none of the packages", None)
    weak = {
        f"{part['name']} {part['version']}": [one["id"] for one in part["vulns"]]
        for part in asked
        if part.get("vulns")
    }
    text = f"{len(asked)} packages, {len(weak)} with known vulnerabilities"
    if len(parts) > len(asked):
        text += f", {len(parts) - len(asked)} not known to the database"
    if weak:
        text += f": {weak}"
    return Row(case, text, not weak)
