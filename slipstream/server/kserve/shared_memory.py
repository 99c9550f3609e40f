"""Memory that clients on the same machine share with the server: registered by name, read and
written in place.

System regions are POSIX shared memory, files under /dev/shm. Registration is off by default: a
region is a path into this machine, and a client that registers one can read it through a model.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.tensor_bytes import Buffer

PLACE = Path("/dev/shm")
REFUSED = (
    "shared memory registration is not allowed; start the server with --allow-client-shm=true to "
    "allow it"
)
CUDA_HANDLE_BYTES = 64


@dataclass(frozen=True)
class Region:
    name: str
    key: str
    offset: int
    byte_size: int
    memory: mmap.mmap = field(repr=False)

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "key": self.key,
            "offset": self.offset,
            "byte_size": self.byte_size,
        }


class SharedMemory:
    """The regions that clients have registered."""

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region] = {}

    def status(self, name: str = "") -> list[dict[str, Any]]:
        if name and name not in self._regions:
            raise InferenceError(
                f"Unable to find system shared memory region: '{name}'", Code.NOT_FOUND
            )
        return [
            region.document() for key, region in sorted(self._regions.items()) if name in ("", key)
        ]

    def cuda_status(self, name: str = "") -> list[dict[str, Any]]:
        if name:
            raise InferenceError(
                f"Unable to find cuda shared memory region: '{name}'", Code.NOT_FOUND
            )
        return []

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self._check_allowed()
        if name in self._regions:
            raise InferenceError(
                f"shared memory region '{name}' already in manager", Code.ALREADY_EXISTS
            )
        self._regions[name] = Region(
            name, key, offset, byte_size, _open(key, offset, byte_size, name)
        )

    def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        if len(handle) != CUDA_HANDLE_BYTES:
            raise InferenceError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        self._check_allowed()
        raise InferenceError("cuda shared memory is not supported by this server", Code.UNSUPPORTED)

    def unregister(self, name: str = "") -> None:
        """Remove one region, or all. Like in Triton, an unknown name is no error."""
        for key in [name] if name else list(self._regions):
            region = self._regions.pop(key, None)
            if region is not None:
                region.memory.close()

    def unregister_cuda(self, name: str = "") -> None:
        """Do nothing: CUDA regions cannot be registered."""

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """Return a copy: the client may change the region while the model runs."""
        region = self._find(name, offset, byte_size)
        start = region.offset + offset
        try:
            return region.memory[start : start + byte_size]
        except (
            ValueError
        ) as error:  # unregistered in the meantime; long requests are read in a thread
            raise _unknown_region(name) from error

    def write(self, name: str, offset: int, byte_size: int, data: Buffer, tensor: str) -> None:
        region = self._find(name, offset, byte_size)
        if len(data) > byte_size:
            raise InferenceError(
                f"shared memory size specified with the request for output '{tensor}' "
                f"({byte_size} bytes) should be at least {len(data)} bytes to hold the results",
                Code.INTERNAL,
            )
        start = region.offset + offset
        region.memory[start : start + len(data)] = data

    def check_places(self, places: Iterable[object]) -> None:
        """Look at the places of a request's outputs before it runs; None: no place.

        A secondary front end has no regions and forwards such a request.
        """

    def close(self) -> None:
        self.unregister()

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise InferenceError(REFUSED, Code.UNSUPPORTED)

    def _find(self, name: str, offset: int, byte_size: int) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise _unknown_region(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise InferenceError(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region


def _unknown_region(name: str) -> InferenceError:
    return InferenceError(f"Unable to find shared memory region: '{name}'", Code.NOT_FOUND)


def _open(key: str, offset: int, byte_size: int, name: str) -> mmap.mmap:
    cannot = InferenceError(f"Unable to open shared memory region: '{key}'", Code.INTERNAL)
    file_name = key.lstrip("/")
    # A key is the name of one file, never a path. Hidden files and those of Triton's Python backend
    # are not for clients.
    if (
        not file_name
        or "/" in file_name
        or file_name.startswith((".", "triton_python_backend_shm"))
    ):
        raise cannot
    try:
        descriptor = os.open(PLACE / file_name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise cannot from error
    try:
        if offset < 0 or byte_size <= 0 or os.fstat(descriptor).st_size < offset + byte_size:
            raise InferenceError(f"failed to register shared memory region '{name}': invalid args")
        return mmap.mmap(descriptor, offset + byte_size)
    finally:
        os.close(descriptor)
