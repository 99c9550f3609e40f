"""Regions that change while they are registered: a client may do anything with its own file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.shared_memory import PLACE, SharedMemory

SIZE = 100_000


@pytest.fixture
def file() -> Iterator[Path]:
    path = PLACE / f"slipstream-test-{os.getpid()}"
    path.write_bytes(bytes(range(250)) * (SIZE // 250))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def memory(file: Path) -> SharedMemory:
    memory = SharedMemory(allowed=True)
    memory.register("region", f"/{file.name}", 50, SIZE - 50)
    return memory


def test_regions_are_read_and_written_at_their_offset(memory: SharedMemory, file: Path) -> None:
    assert memory.read("region", 10, 3) == bytes([60, 61, 62])
    memory.write("region", 20, 4, b"four", "OUT")
    assert file.read_bytes()[70:74] == b"four"
    assert file.stat().st_size == SIZE


# In a process of its own: an access beyond the end of a mapped file ends the process by SIGBUS.
_SHRINK = """
import os, sys
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.shared_memory import SharedMemory

path, size = sys.argv[1], int(sys.argv[2])
memory = SharedMemory(allowed=True)
memory.register("region", "/" + os.path.basename(path), 50, size - 50)
os.truncate(path, 60)
for access in (
    lambda: memory.read("region", 0, size - 50),
    lambda: memory.read("region", 20_000, 8),
    lambda: memory.write("region", 20_000, 8, b"12345678", "OUT"),
):
    try:
        access()
    except InferenceError as error:
        print(error.status, error.message)
print(memory.read("region", 0, 10) == bytes(range(50, 60)))
"""


def test_a_region_that_shrinks_fails_the_request_and_not_the_server(file: Path) -> None:
    command = [sys.executable, "-c", _SHRINK, str(file), str(SIZE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refused = (
        "400 shared memory region 'region' has become smaller than it was registered: "
        f"'/{file.name}' has 60 bytes. Register it again with its new size."
    )
    assert ended.stdout.splitlines() == [refused] * 3 + ["True"], ended.stderr
    assert ended.returncode == 0
    assert file.stat().st_size == 60


def test_a_region_can_be_unregistered_while_a_thread_reads_it(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = memory._find

    def find_and_unregister(*args: Any) -> Any:
        region = find(*args)
        memory.unregister("region")
        return region

    monkeypatch.setattr(memory, "_find", find_and_unregister)
    assert memory.read("region", 0, 2) == bytes([50, 51])
    with pytest.raises(InferenceError, match="Unable to find shared memory region: 'region'"):
        memory.read("region", 0, 2)


def test_unregistered_regions_leave_no_open_file(memory: SharedMemory, file: Path) -> None:
    def open_files() -> list[str]:
        links = Path("/proc/self/fd").iterdir()
        return [os.readlink(link) for link in links if link.is_symlink()]

    assert str(file) in open_files()
    memory.unregister()
    assert str(file) not in open_files()
