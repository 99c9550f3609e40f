"""Memory that clients on the same machine share with the server, registered by name.

System regions are POSIX shared memory, files under /dev/shm. They are read and written by system
calls, not mapped: a client may shrink the file at any time, and an access to a mapped page beyond
its end would kill the server. Registration is off by default: a region is a path into this machine,
and a client that registers one can read it through a model.
"""

from __future__ import annotations

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


class _OpenFile:
    """A file descriptor that is closed with the last reference.

    A thread may still read or write the file when its region is unregistered.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @property
    def byte_size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, byte_size: int) -> bytes:
        """Return these bytes, or fewer where the file ends."""
        pieces: list[bytes] = []
        while byte_size > 0 and (piece := os.pread(self.descriptor, byte_size, start)):
            pieces.append(piece)
            start += len(piece)
            byte_size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, start: int, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self.descriptor, rest, start)
            start += count
            rest = rest[count:]


@dataclass(frozen=True)
class Region:
    name: str
    key: str
    offset: int
    byte_size: int
    file: _OpenFile = field(repr=False)

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
            self._regions.pop(key, None)

    def unregister_cuda(self, name: str = "") -> None:
        """Do nothing: CUDA regions cannot be registered."""

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """Return a copy: the client may change the region while the model runs."""
        region = self._find(name, offset, byte_size)
        data = region.file.read(region.offset + offset, byte_size)
        if len(data) < byte_size:
            raise _shrunk(region)
        return data

    def write(self, name: str, offset: int, byte_size: int, data: Buffer, tensor: str) -> None:
        region = self._find(name, offset, byte_size)
        if len(data) > byte_size:
            raise InferenceError(
                f"shared memory size specified with the request for output '{tensor}' "
                f"({byte_size} bytes) should be at least {len(data)} bytes to hold the results",
                Code.INTERNAL,
            )
        start = region.offset + offset
        if region.file.byte_size < start + len(data):  # writing would make the file larger
            raise _shrunk(region)
        region.file.write(start, data)

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


def _shrunk(region: Region) -> InferenceError:
    return InferenceError(
        f"shared memory region '{region.name}' has become smaller than it was registered: "
        f"'{region.key}' has {region.file.byte_size} bytes. Register it again with its new size."
    )


def _open(key: str, offset: int, byte_size: int, name: str) -> _OpenFile:
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
        file = _OpenFile(PLACE / file_name)
    except OSError as error:
        raise cannot from error
    if offset < 0 or byte_size <= 0 or file.byte_size < offset + byte_size:
        raise InferenceError(f"failed to register shared memory region '{name}': invalid args")
    return file
