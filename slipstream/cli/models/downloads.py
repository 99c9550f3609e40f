"""The downloads of known models from the Python package index, and what of them can be removed."""

from __future__ import annotations

import shutil

from slipstream.weights.cache.engines import folder_bytes, list_engines
from slipstream.weights.cache.locks import locked
from slipstream.weights.sources.known_models import (
    KNOWN_MODELS,
    PackagedModel,
    remove_left_downloads,
)


def remove_unused_downloads() -> int:
    """Remove the downloads that no engine of the cache was built from, and what killed downloads
    have left. Returns their bytes.

    The cache of the Hugging Face hub is shared with other programs and stays.
    """
    freed = 0
    for name, model in KNOWN_MODELS.items():
        if not isinstance(model, PackagedModel) or not model.folder.is_dir():
            continue
        with locked(f"source {name}"):  # not while it is fetched or built from
            if name not in {engine.config.source for engine in list_engines()}:
                freed += folder_bytes(model.folder)
                shutil.rmtree(model.folder)
                continue
            before = folder_bytes(model.folder)
            remove_left_downloads(model.folder)
            freed += before - folder_bytes(model.folder)
    return freed
