"""The memory that a process may use, from files as Linux writes them."""

import pytest

from slipstream.engine.memory.host import HostMemory, read_host_memory

GIB = 2**30
MEMINFO = f"MemTotal: {8 * 2**20} kB\nMemFree: 100 kB\nMemAvailable: {6 * 2**20} kB\nHugePages: 0\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return read_host_memory(root / "proc", root / "cgroup")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, HostMemory(8 * GIB, 6 * GIB)),
        # version 2, seen from within a container
        (
            {
                "proc/self/cgroup": "0::/\n",
                "cgroup/memory.max": 4 * GIB,
                "cgroup/memory.current": 3 * GIB,
                "cgroup/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            },
            HostMemory(4 * GIB, 3 * GIB),
        ),
        # version 2, seen from the host: the parent has the limit
        (
            {
                "proc/self/cgroup": "0::/system.slice/slipstream.service\n",
                "cgroup/system.slice/memory.max": 2 * GIB,
                "cgroup/system.slice/memory.current": GIB,
                "cgroup/system.slice/slipstream.service/memory.max": "max\n",
            },
            HostMemory(2 * GIB, GIB),
        ),
        # version 1
        (
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/a\n8:memory:/a/b\n",
                "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
                "cgroup/memory/a/b/memory.limit_in_bytes": GIB,
                "cgroup/memory/a/b/memory.usage_in_bytes": 3 * GIB // 4,
                "cgroup/memory/a/b/memory.stat": f"total_inactive_file {GIB // 4}\n",
            },
            HostMemory(GIB, GIB // 2),
        ),
        # the machine has less left than the container
        (
            {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": 7 * GIB},
            HostMemory(7 * GIB, 6 * GIB),
        ),
        # more is used than the limit allows
        (
            {
                "proc/self/cgroup": "0::/\n",
                "cgroup/memory.max": GIB,
                "cgroup/memory.current": 2 * GIB,
            },
            HostMemory(GIB, 0),
        ),
    ],
    ids=["no groups", "container", "slice", "version 1", "machine is full", "over the limit"],
)
def test_memory_within_the_limits_of_control_groups(tmp_path, groups, expected):
    assert write(tmp_path, {"proc/meminfo": MEMINFO, **groups}) == expected


def test_without_the_kernels_files_all_memory_is_available(tmp_path):
    found = read_host_memory(tmp_path, tmp_path)
    assert found.total == found.available > 0


def test_this_machine_has_memory_available():
    found = read_host_memory()
    assert 0 < found.available <= found.total
