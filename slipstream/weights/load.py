"""Start an engine from an engine folder."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engine.loop import EngineLoop, Progress
from slipstream.engine.memory.nodes import on_one_of_several_nodes
from slipstream.engine.ranks.following import Follower
from slipstream.engine.ranks.orders import Followers
from slipstream.engine.settings import EngineSettings
from slipstream.engine.sizes import BuiltLimits
from slipstream.engine.start import RankGroup, create_engine, create_follower
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.kernels.stored import Weight
from slipstream.weights.cache.locks import hold
from slipstream.weights.engine_config import CONFIG_NAME
from slipstream.weights.engine_folder import EngineFolder, rank_file, read_engine_folder
from slipstream.weights.home import cpu_code_folder, packed_folder, slipstream_home
from slipstream.weights.integrity import identify_folder, verify_weights
from slipstream.weights.lora import read_adapter_folder
from slipstream.weights.shards import rank_spec, rank_tensors, rank_weights

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.engine.cpu.packed_file import PackedFile
    from slipstream.kernels.gpu.compilation.pool import CompilePool

# Smaller engines are packed at each start.
_PACKED_FROM_BYTES = 8 << 20
_NAME_DIGITS = 24  # of a digest, in a folder's name


@dataclass(frozen=True)
class FolderWeights:
    """The weights of one rank's part of an engine folder."""

    folder: EngineFolder
    rank: int = 0
    ranks: int = 1

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        import torch

        return rank_tensors(self.folder, self.rank, self.ranks, getattr(torch, dtype))

    def arrays(self) -> dict[str, Weight]:
        if self.ranks > 1:
            return rank_weights(self.folder, self.rank, self.ranks)
        return self.folder.weights()

    def packed_file(self, dtype: str) -> PackedFile | None:
        path = self.folder.path
        size = rank_file(path, 0).stat().st_size
        if size < _PACKED_FROM_BYTES:
            return None
        from slipstream.engine.cpu.packed_file import PackedFile

        digest = identify_folder(path)
        part = f"rank{self.rank}" + (f"of{self.ranks}" if self.ranks > 1 else "")
        # the second folder is for engines in folders that this user cannot write
        folders = (path, packed_folder(slipstream_home()) / digest[:_NAME_DIGITS])
        name = f"{part}.packed-{dtype}"
        return PackedFile(
            folders,
            name,
            f"{digest} {part}",
            dtype,
            2 * size // self.ranks,
            own_memory=on_one_of_several_nodes(),
        )


def start_engine(
    path: str | Path,
    settings: EngineSettings,
    progress: Progress = lambda phase, done, total: None,
    compiler: CompilePool | None = None,
    ranks: Ranks = ALONE,
    followers: Followers | None = None,
) -> EngineLoop:
    """Load an engine folder from disk and start an engine with its weights.

    This function reads and verifies the files. `engine.start.create_engine` does the rest: it
    builds the model, sizes the cache and warms up. `progress` reports how far each phase has come.

    compiler: processes that compile the kernels of a GPU.
    ranks, followers: with several ranks, this one leads.
    """
    folder = read_engine_folder(path)
    mark = hold(folder.path / CONFIG_NAME)  # no command removes the folder meanwhile
    group = None if followers is None else RankGroup(ranks, folder.spec, followers)
    with verify_weights(folder):
        loop = create_engine(
            rank_spec(folder.spec, ranks.size),
            FolderWeights(folder, ranks.rank, ranks.size),
            settings,
            folder.build.max_seq_len,
            progress,
            read_adapter_folder,
            fp8_cache=folder.quantisation.kv_cache == "FP8",
            most_step_tokens=folder.build.chosen("max_num_tokens"),
            most_rows=folder.build.chosen("max_batch_size"),
            compiler=compiler,
            group=group,
            code_folder=cpu_code_folder(slipstream_home()),
        )
    if mark is not None:
        loop.on_close = mark.close
    return loop


def start_follower(path: str | Path, settings: EngineSettings, ranks: Ranks) -> Follower:
    """Load one rank's part of an engine folder. The first rank of a machine verifies the files."""
    folder = read_engine_folder(path)
    limits = BuiltLimits(
        folder.build.max_seq_len,
        folder.build.chosen("max_num_tokens"),
        folder.build.chosen("max_batch_size"),
        folder.quantisation.kv_cache == "FP8",
    )
    spec = rank_spec(folder.spec, ranks.size)
    weights = FolderWeights(folder, ranks.rank, ranks.size)
    with verify_weights(folder) if ranks.local_rank == 0 else nullcontext():
        code = cpu_code_folder(slipstream_home())
        return create_follower(spec, weights, settings, limits, ranks, code)
