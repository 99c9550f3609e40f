"""Open the source that a user names: a folder, a GGUF file, a hub id or a known name."""

from __future__ import annotations

import re
from pathlib import Path

from slipstream.weights.checkpoint import CheckpointSource, is_checkpoint
from slipstream.weights.home import expand_home
from slipstream.weights.sources.gguf_source import GgufSource
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.hub import open_hub_model
from slipstream.weights.sources.known_models import KNOWN_MODELS, HubModel, open_known_model
from slipstream.weights.sources.source import Source, SourceError
from slipstream.weights.stream import Progress, no_progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def canonical_source(text: str) -> str:
    """Return one text for each source, however a user writes it: the absolute path of a file or a
    folder, `hf:org/name` for a model of the hub, or the name of a packaged model.
    """
    path = expand_home(text.removeprefix("local:"))
    if not text.startswith(("hf:", "ngc:")) and path.exists():
        return str(path.resolve())
    known = KNOWN_MODELS.get(text)
    if isinstance(known, HubModel):
        return f"hf:{known.repository}"
    return f"hf:{text}" if known is None and _HUB_ID.fullmatch(text) else text


def open_source(text: str, progress: Progress = no_progress) -> Source:
    """Open `hf:org/name`, `local:path`, a path, a known name, or `org/name` at the hub.

    Only the headers of local files are read. A model at the hub is downloaded once its config is
    known to be supported. Raises SourceError or UnsupportedModel with one line.
    """
    if text.startswith("hf:"):
        return open_hub_model(text.removeprefix("hf:"), text, progress)
    if text.startswith("ngc:"):
        raise SourceError(
            f"{text}: sources of NGC are not supported; use hf:org/name, a folder or a GGUF file"
        )
    path = expand_home(text.removeprefix("local:"))
    if path.is_file():
        return GgufSource(path, text)
    if path.is_dir():
        if is_checkpoint(path):
            return CheckpointSource(path, text)
        _check_model_folder(path)
        return HuggingFaceFolder(path, text)
    if text.startswith("local:"):
        raise SourceError(f"{path}: no such folder or file")
    if text in KNOWN_MODELS:
        return open_known_model(text, progress)
    if _HUB_ID.fullmatch(text):
        return open_hub_model(text, f"hf:{text}", progress)
    if text.startswith((".", "/", "~")) or text.endswith(".gguf"):
        raise SourceError(f"{text}: no such folder or file")
    raise SourceError(
        f"{text}: no such folder or file, and not a known model; known: {', '.join(KNOWN_MODELS)}"
    )


def _check_model_folder(folder: Path) -> None:
    """Raise SourceError if a folder holds no Hugging Face model."""
    if (folder / "config.json").exists():
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        raise SourceError(f"{folder}: has GGUF files, no config.json: give {folder / files[0]}")
    raise SourceError(
        f"{folder}: config.json is missing. A model folder holds config.json, the weights as "
        "*.safetensors, and the tokenizer (tokenizer.json or tokenizer.model)"
    )
