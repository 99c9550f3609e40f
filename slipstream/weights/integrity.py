"""Verify that an engine's weights are those that were built.

A flipped bit on a disk raises no error by itself: it only makes the generated text worse.
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


def identify_folder(path: str | Path) -> str:
    """Return a digest of an engine folder's config.json, which has the digests of the weights."""
    return hashlib.sha256(Path(path, "config.json").read_bytes()).hexdigest()


@contextmanager
def verify_weights(config: EngineConfig) -> Iterator[None]:
    """Hash the weights in threads while the body runs, and raise at its end if the hash is wrong.

    The body loads the same files, so they are read from the disk once. Tokenizer files are not
    verified, because users edit them.
    """
    recorded = {name: digest for name, digest in config.files.items() if name.endswith(".engine")}
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, len(recorded)), "check weights") as threads:
        found = {name: threads.submit(_digest, config.path / name, stop) for name in recorded}
        try:
            yield
        except BaseException:
            stop.set()  # the load failed, so the threads need not finish
            raise
    for name, digest in recorded.items():
        if found[name].result() != digest:
            raise EngineFolderError(
                f"{config.path / name}: not the weights that were built: "
                "their SHA-256 is not the one in config.json; "
                "copy the file again, or import the model again"
            )


def _digest(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (size := file.readinto(piece)):
            digest.update(piece[:size])
    return digest.hexdigest()
