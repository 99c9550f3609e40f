"""The downloads of known models from the Python package index, and what of them can be removed."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from slipstream.weights.cache.engines import folder_bytes, list_engines
from slipstream.weights.cache.locks import locked
from slipstream.weights.sources.known_models import (
    KNOWN_MODELS,
    PackagedModel,
    remove_left_downloads,
)


class Download(NamedTuple):
    folder: Path
    bytes: int


def unused_downloads(built: Collection[str]) -> list[Download]:
    """Return the downloads of known models that are not among these sources of engines.

    The cache of the Hugging Face hub is shared with other programs and stays.
    """
    return [
        Download(model.folder, folder_bytes(model.folder))
        for name, model in KNOWN_MODELS.items()
        if isinstance(model, PackagedModel) and model.folder.is_dir() and name not in built
    ]


def remove_unused_downloads() -> list[Download]:
    """Remove the downloads that no engine of the cache was built from, and what killed downloads
    have left. Returns what was removed.
    """
    removed = []
    for name, model in KNOWN_MODELS.items():
        if not isinstance(model, PackagedModel) or not model.folder.is_dir():
            continue
        with locked(f"source {name}"):  # not while it is fetched or built from
            unused = [
                one for one in unused_downloads(built_sources()) if one.folder == model.folder
            ]
            if unused:
                shutil.rmtree(model.folder)
                removed += unused
                continue
            before = folder_bytes(model.folder)
            remove_left_downloads(model.folder)
            if freed := before - folder_bytes(model.folder):
                removed.append(Download(model.folder, freed))
    return removed


def built_sources(without: Collection[Path] = ()) -> set[str]:
    """Return the sources that the engines of the cache were built from, without some of them."""
    return {engine.config.source for engine in list_engines() if engine.path not in without}
