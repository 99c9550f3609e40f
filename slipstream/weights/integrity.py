"""Whether an engine's weights are those that were built. A bit that flipped on a disk would only
show as worse text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from slipstream.weights.engine_config import EngineConfig, EngineFolderError

_PIECE_BYTES = 8 << 20


@contextmanager
def verify_weights(config: EngineConfig) -> Iterator[None]:
    """Hash the weights beside what is done meanwhile, which reads the same file; raise at the end
    where they differ.

    Tokenizer files are not asked about: people edit those.
    """
    recorded = {name: digest for name, digest in config.files.items() if name.endswith(".engine")}
    no_more = threading.Event()
    with ThreadPoolExecutor(max(1, len(recorded)), "check weights") as threads:
        found = {name: threads.submit(_digest, config.path / name, no_more) for name in recorded}
        try:
            yield
        except BaseException:
            no_more.set()  # the caller is not to wait for what it no longer asks
            raise
    for name, digest in recorded.items():
        if found[name].result() != digest:
            raise EngineFolderError(
                f"{config.path / name}: not the weights that were built: their SHA-256 is not the one in config.json; "
                "copy the file again, or import the model again"
            )


def _digest(path: Path, no_more: threading.Event) -> str:
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while not no_more.is_set() and (size := file.readinto(piece)):
            digest.update(piece[:size])
    return digest.hexdigest()
