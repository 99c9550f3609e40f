"""Start an engine from an engine folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engine.loop import EngineLoop, Progress
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.integrity import verify_weights
from slipstream.weights.lora import read_adapter_folder

if TYPE_CHECKING:
    from slipstream.kernels.gpu.compilation.pool import CompilePool


def start_engine(
    path: str | Path,
    settings: EngineSettings,
    progress: Progress = lambda phase, done, total: None,
    compiler: CompilePool | None = None,
) -> EngineLoop:
    """Load an engine folder from disk and start an engine with its weights.

    This function reads and verifies the files. `engine.start.create_engine` does the rest: it
    builds the model, sizes the cache and warms up. `progress` reports how far each phase has come.

    compiler: processes that compile the kernels of a GPU.
    """
    folder = read_engine_folder(path)
    with verify_weights(folder):
        return create_engine(
            folder.spec,
            folder.tensors(),
            settings,
            folder.build.max_seq_len,
            progress,
            read_adapter_folder,
            fp8_cache=folder.quantisation.kv_cache == "FP8",
            most_step_tokens=folder.build.chosen("max_num_tokens"),
            most_rows=folder.build.chosen("max_batch_size"),
            compiler=compiler,
        )
