"""Open a model of the Hugging Face hub.

The config is downloaded first, so that an unsupported model is refused before its weights are
downloaded.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from slipstream.model.families.registry import find_family
from slipstream.weights.home import hugging_face_cache, hugging_face_home, no_space
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.source import SourceError, read_json
from slipstream.weights.sources.watched_fetch import watched_fetch
from slipstream.weights.stream import Progress, no_progress

_WANTED = [
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "vocab.txt",
    "merges.txt",
    "model.safetensors",
    "model-*.safetensors",
    "gptq_model-*.safetensors",
]
# Copies in other formats, such as original/ and onnx/. Modules of sentence-transformers have
# numbers: 1_Pooling/.
_SUBFOLDERS = ["[!0-9]*/*"]


def open_hub_model(
    repository: str, label: str, progress: Progress = no_progress
) -> HuggingFaceFolder:
    """Download new files of `org/name` into the shared cache and open it there.

    Without a network, a copy that was downloaded before is used.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    options = _options()
    try:
        config = Path(hf_hub_download(repository, "config.json", **options))
        find_family(read_json(config))
        wanted = {"allow_patterns": _WANTED, "ignore_patterns": _SUBFOLDERS, **options}
        missing = _missing_bytes(repository, wanted)
        with _reported(repository, missing, progress):
            folder = snapshot_download(repository, tqdm_class=_hidden_bar(), **wanted)
    except Exception as error:
        text = _explanation(error)
        if text is None:
            raise
        raise SourceError(f"{repository}: {text}") from error
    return HuggingFaceFolder(Path(folder), label)


def _missing_bytes(repository: str, options: Mapping[str, Any]) -> int:
    """Return the size of the files that a download would fetch."""
    from huggingface_hub import snapshot_download

    if options["local_files_only"]:
        return 0
    files = snapshot_download(repository, dry_run=True, tqdm_class=_hidden_bar(), **options)
    return sum(file.file_size for file in files if file.will_download)


def _reported(
    repository: str, missing: int, progress: Progress
) -> AbstractContextManager[None, bool | None]:
    """Report how far a download has come, by the size of the files in the hub's cache."""
    if not missing:
        return nullcontext()
    blobs = hugging_face_cache() / f"models--{repository.replace('/', '--')}" / "blobs"
    before = _folder_bytes(blobs)
    return watched_fetch(
        f"fetching {repository}",
        missing,
        lambda: _folder_bytes(blobs) - before,
        progress,
    )


def _folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder, which may change meanwhile."""
    total = 0
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):  # a partial file was renamed in between
            total += path.stat().st_size
    return total


def _hidden_bar() -> Any:
    """Return a class of progress bars that show nothing: the commands show their own."""
    from huggingface_hub import utils

    bars: Any = utils.tqdm  # type: ignore[attr-defined]

    class HiddenBar(bars):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **{**options, "disable": True})

    return HiddenBar


def _options() -> dict[str, Any]:
    return {
        "cache_dir": hugging_face_cache(),
        "endpoint": os.environ.get("HF_ENDPOINT") or None,
        "token": os.environ.get("HF_TOKEN") or None,
        "local_files_only": not _name_resolves(),
    }


def fetch_tokenizer(repository: str) -> Path:
    """Return the folder of a hub model's tokenizer, downloaded without the weights."""
    from huggingface_hub import snapshot_download

    wanted = [pattern for pattern in _WANTED if not pattern.endswith(".safetensors")]
    try:
        return Path(
            snapshot_download(
                repository, allow_patterns=wanted, ignore_patterns=_SUBFOLDERS, **_options()
            )
        )
    except Exception as error:
        text = _explanation(error)
        if text is None:
            raise
        raise SourceError(f"{repository}: {text}") from error


def find_local_copy(repository: str, model_type: str) -> Path | None:
    """Return a usable copy on this machine, or None.

    The copy is in the hub's cache, or is a model folder mounted in place of the cache. Such a
    folder does not name its model, so only its type is checked.
    """
    from huggingface_hub import snapshot_download

    for cache in (hugging_face_cache(), hugging_face_home()):
        try:
            folder = Path(
                snapshot_download(
                    repository,
                    cache_dir=cache,
                    local_files_only=True,
                    allow_patterns=_WANTED,
                    ignore_patterns=_SUBFOLDERS,
                )
            )
        except (FileNotFoundError, ValueError):
            continue  # this cache has no copy
        if _has_weights(folder):
            return folder
    for folder in (hugging_face_home(), hugging_face_home() / repository.rpartition("/")[2]):
        if (
            _has_weights(folder)
            and read_json(folder / "config.json").get("model_type") == model_type
        ):
            return folder
    return None


def _name_resolves() -> bool:
    """Return whether the hub's address can be resolved.

    Without a network the library would retry for half a minute.
    """
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if getproxies():
        return True  # the proxy resolves the address
    try:
        socket.getaddrinfo(address.hostname, address.port or 443)
    except OSError:
        return False
    return True


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _explanation(error: Exception) -> str | None:
    """Return a remedy for an error of the hub, or None for any other error."""
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return no_space(hugging_face_cache(), "HF_HOME")
    if isinstance(error, errors.GatedRepoError):
        return (
            "access to this model must be requested: accept its licence on its page at the hub, "
            "then set HF_TOKEN to a token of that account (or run `hf auth login`)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "no such model at the hub, or it is private: check the name; "
            "for a private one set HF_TOKEN (or run `hf auth login`)"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "the repository has no config.json: it is not a model in Hugging Face's format"
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "?")
        reason = "the hub returned an error"
        if status == 401:
            reason = "the token in HF_TOKEN was refused"
        return f"{reason} (HTTP status {status})"
    if isinstance(
        error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError
    ):
        return (
            "the hub cannot be reached and no copy is on this machine: "
            "check the network and HF_ENDPOINT, or use a local folder or GGUF file"
        )
    return None
