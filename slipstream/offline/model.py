"""The engine folder of a model that `slipstream.LLM` is given."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.offline.progress import LoadProgress
from slipstream.repository.collection import remove_former_engines
from slipstream.weights.cache.engines import cached_engine
from slipstream.weights.engine_config import (
    EngineFolderError,
    find_engine_folder,
    read_engine_config,
)
from slipstream.weights.home import expand_home


def engine_folder(
    model: str | Path,
    dtype: str,
    weight_only: str | None,
    progress: LoadProgress | None = None,
) -> Path:
    """Return the engine folder of a model. Builds the engine if there is none."""
    path = expand_home(model)
    if path.is_dir() and _is_engine(path):
        if weight_only is not None:
            raise ValueError(f"{path} is already built: weight_only applies to new builds only")
        return read_engine_config(path).path
    display = progress or LoadProgress(shown=False)
    engine = cached_engine(
        str(model),
        dtype,
        weight_only,
        display.update,
        lambda: display.say("Waiting for another process that works on the same model"),
    )
    remove_former_engines(engine)
    return engine


def _is_engine(path: Path) -> bool:
    """Return whether the folder is an engine of any release. Reading it finds what is wrong."""
    try:
        config = json.loads((find_engine_folder(path) / "config.json").read_text(encoding="utf-8"))
    except (EngineFolderError, OSError, ValueError):
        return False  # building from it reports what is missing
    return isinstance(config, dict) and "pretrained_config" in config
