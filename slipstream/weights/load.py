"""From an engine folder to a running engine."""

from __future__ import annotations

from pathlib import Path

from slipstream.engine.loop import EngineLoop
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.weights.engine_folder import read_engine_folder


def start_engine(path: str | Path, settings: EngineSettings) -> EngineLoop:
    """Load the weights, size the cache, warm up."""
    folder = read_engine_folder(path)
    return create_engine(folder.spec, folder.tensors(), settings, folder.build.max_seq_len)
