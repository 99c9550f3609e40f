"""The cache of engine folders: one for each source, type and quantisation.

Every command and `slipstream.LLM` take their engine from here. An engine folder is never changed,
except that engines on a CPU add packed weights. If the source has changed, another folder is built
beside it, so that running servers keep theirs.

    engines/smollm2-135m-stored-3f2a91bc.77aa01d2
            name         type   key      content

The key covers the source, the type and the quantisation. The content covers the state of the source
and the release that built the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.weights.build import EnginePlan, build_engine, plan_engine
from slipstream.weights.cache.locks import is_held, locked
from slipstream.weights.engine_config import (
    CONFIG_NAME,
    EngineConfig,
    EngineFolderError,
    read_engine_config,
)
from slipstream.weights.home import expand_home, slipstream_home
from slipstream.weights.sources.open_source import canonical_source, open_source
from slipstream.weights.stream import Progress, no_progress
from slipstream.weights.whole_folder import remove_abandoned

_UNFIT_FOR_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_FOLDER = re.compile(r"(?P<family>.+-[0-9a-f]{8})\.[0-9a-f]{8}")


@dataclass(frozen=True)
class CachedEngine:
    config: EngineConfig
    bytes: int  # on disk
    built_seconds: float  # when it was built, in seconds since 1970

    @property
    def path(self) -> Path:
        return self.config.path

    @property
    def in_use(self) -> bool:
        """Whether a running process has loaded it."""
        return is_held(self.path / CONFIG_NAME)


def engines_folder() -> Path:
    """Return the folder of the cache: ENGINE_DEST_PATH if it is set."""
    place = os.environ.get("ENGINE_DEST_PATH")
    folder = expand_home(place, "ENGINE_DEST_PATH") if place else slipstream_home() / "engines"
    return folder.absolute()


def cached_engine(
    source: str,
    dtype: str = "auto",
    weight_only: str | None = None,
    progress: Progress | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> Path:
    """Return the engine folder of a source. Builds it if it is missing or the source has changed.

    `on_wait` is called if another process builds from the same source. Raises SourceError,
    UnsupportedModel or ValueError with one line that gives the reason.
    """
    progress = progress or no_progress
    folder = engines_folder()
    canonical = canonical_source(source)
    # also held while the source is fetched, so that two commands do not fetch it at once
    with locked(f"source {canonical}", on_wait):
        # a folder of the cache records the absolute path, so that it can be found again
        opened = open_source(canonical if Path(canonical).is_absolute() else source, progress)
        plan = plan_engine(opened, dtype, weight_only)
        output = folder / _folder_name(canonical, plan, weight_only)
        return build_engine(opened, output, dtype=dtype, weight_only=weight_only, progress=progress)


def _folder_name(source: str, plan: EnginePlan, weight_only: str | None) -> str:
    readable = _UNFIT_FOR_A_NAME.sub("-", Path(source).name).strip(".-") or "model"
    if weight_only is not None:
        kind = weight_only
    else:
        kind = "stored" if plan.quantisation.stored else plan.dtype
    key = hashlib.sha256(json.dumps([source, plan.dtype, kind]).encode()).hexdigest()
    return f"{readable}-{kind}-{key[:8]}.{plan.inputs_hash[:8]}"


def list_engines() -> list[CachedEngine]:
    """Return the whole engines of the cache, by name."""
    found = []
    for path in sorted(engines_folder().glob(f"*/{CONFIG_NAME}")):
        try:
            found.append(describe_engine(path.parent))
        except EngineFolderError:
            continue  # of another release, or not an engine: not ours to list or remove
    return found


def describe_engine(path: Path) -> CachedEngine:
    """Return what an engine folder is. Raises EngineFolderError."""
    config = read_engine_config(path)
    built = (config.path / CONFIG_NAME).stat().st_mtime
    return CachedEngine(config, folder_bytes(config.path), built)


def is_cached(engine: Path) -> bool:
    """Return whether a folder is one of the cache: nothing else is ever removed."""
    return engine.parent == engines_folder() and (engine / CONFIG_NAME).is_file()


def former_engines(engine: Path) -> list[CachedEngine]:
    """Return the engines of the same source, type and quantisation from before it changed."""
    match = _FOLDER.fullmatch(engine.name)
    if match is None or not is_cached(engine):
        return []
    return [
        other
        for other in list_engines()
        if other.path.name.startswith(f"{match['family']}.") and other.path != engine
    ]


def remove_engine(engine: Path) -> int:
    """Remove an engine of the cache. Returns the bytes that it took.

    Its config goes first: what is left of an interrupted removal is no engine.
    """
    assert is_cached(engine), "only folders of the cache are removed"
    freed = folder_bytes(engine)
    (engine / CONFIG_NAME).unlink()
    shutil.rmtree(engine)
    return freed


def remove_remains() -> int:
    """Remove what interrupted builds left in the cache. Returns the bytes that it took."""
    folder = engines_folder()
    if not folder.is_dir():
        return 0
    before = folder_bytes(folder)
    remove_abandoned(folder)
    for child in folder.iterdir():
        # the rest of an interrupted removal
        if _FOLDER.fullmatch(child.name) and not (child / CONFIG_NAME).is_file():
            shutil.rmtree(child)
    return before - folder_bytes(folder)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder and below."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # removed meanwhile
    return total


def type_name(config: EngineConfig) -> str:
    """Return the type of most weights, as users know it: bfloat16, int8, Q4_K."""
    quantisation = config.quantisation
    if quantisation.stored:
        rows: dict[str, int] = {}
        for parts in quantisation.stored.values():
            for part in parts:
                rows[part.form] = rows.get(part.form, 0) + part.rows
        return max(rows, key=lambda form: rows[form])
    names = {"W8A16": "int8", "W4A16": "int4", "FP8": "fp8"}
    return names.get(quantisation.algorithm or "", quantisation.algorithm or config.dtype)
