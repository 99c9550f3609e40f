"""Metrics of the machine, with Triton's names: CPU, memory and GPUs.

GPU metrics are read from NVIDIA's driver library (NVML). A machine without a driver has none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream.server.metrics.prometheus_text import Family, Labels

_PROC = Path("/proc")
_OK = 0
_UUID_BYTES = 96
Handle = ctypes.c_void_p


class Machine:
    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus = gpus or Gpus()
        self._busy, self._total = _cpu_ticks()
        self._utilization = 0.0

    def families(self) -> Iterator[Family]:
        # There is no pool of pinned memory. Dashboards made for Triton still find the names.
        for kind in ("total", "used"):
            text = f"Pinned memory pool {kind} memory size, in bytes"
            yield _gauge(f"nv_pinned_memory_pool_{kind}_bytes", text, 0)
        yield _gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._cpu())
        found = memory()
        used = found["MemTotal"] - found["MemAvailable"]
        total_text = "CPU total memory (RAM), in bytes"
        yield _gauge("nv_cpu_memory_total_bytes", total_text, found["MemTotal"])
        yield _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used)
        yield from self._gpus.families()

    def _cpu(self) -> float:
        """Return the share of CPU time in use since the last scrape."""
        busy, total = _cpu_ticks()
        if total > self._total:
            self._utilization = (busy - self._busy) / (total - self._total)
            self._busy = busy
            self._total = total
        return self._utilization


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [({}, value)])


def _cpu_ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks of all cores since the machine started."""
    fields = [int(word) for word in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]  # idle, and waiting for a disk
    return sum(fields) - idle, sum(fields)


def memory() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    lines = (line.split() for line in (_PROC / "meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    """NVML's second version, which does not count the driver's own memory as used."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    def __init__(self, driver: Any = None) -> None:
        """`driver`: the NVML library; None stands for the one of this machine."""
        self._driver: Any = driver or nvidia_driver()
        self._handles: dict[str, Handle] = {}  # by the GPU's UUID
        if self._driver is not None:
            self._handles = dict(_devices(self._driver))
        self._energy_before = {
            uuid: _energy(self._driver, handle) for uuid, handle in self._handles.items()
        }

    def families(self) -> Iterator[Family]:
        """Return one family for each value. A GPU without the value has no sample in it."""
        for name, text, read in _VALUES:
            samples: list[tuple[Labels, float]] = []
            for uuid, handle in self._handles.items():
                value = read(self._driver, handle)
                if value is not None:
                    samples.append(({"gpu_uuid": uuid}, value))
            if samples:
                yield Family(name, "gauge", text, samples)
        used = list(self._energy())
        if used:
            text = "GPU energy consumption in joules since the Triton Server started"
            yield Family("nv_energy_consumption", "counter", text, used)

    def _energy(self) -> Iterator[tuple[Labels, float]]:
        """Return the energy used since the server started. The driver's counter is older."""
        for uuid, handle in self._handles.items():
            before = self._energy_before[uuid]
            now = _energy(self._driver, handle)
            if before is not None and now is not None:
                yield {"gpu_uuid": uuid}, now - before


def nvidia_driver() -> ctypes.CDLL | None:
    """Return the initialized NVML library, or None when the machine has no NVIDIA driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == _OK else None


def _devices(driver: Any) -> Iterator[tuple[str, Handle]]:
    count = ctypes.c_uint()
    if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
        return
    for index in range(count.value):
        handle = Handle()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        found = driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _OK
        if found and driver.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES) == _OK:
            yield uuid.value.decode(), handle


def _utilization(driver: Any, handle: Handle) -> float | None:
    found = _Utilization()
    known = driver.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == _OK
    return found.gpu / 100 if known else None


ReadValue = Callable[[Any, Handle], float | None]


def _memory(field: str) -> ReadValue:
    def read(driver: Any, handle: Handle) -> float | None:
        found = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        known = driver.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(found)) == _OK
        return int(getattr(found, field)) if known else None

    return read


def _thousandths(function: str, kind: type[ctypes.c_uint] | type[ctypes.c_ulonglong]) -> ReadValue:
    """Return a reader of a value that the driver gives in milliwatts or millijoules."""

    def read(driver: Any, handle: Handle) -> float | None:
        found = kind()
        known = getattr(driver, function)(handle, ctypes.byref(found)) == _OK
        return found.value / 1000 if known else None

    return read


_energy = _thousandths("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
_VALUES: tuple[tuple[str, str, ReadValue], ...] = (
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", _utilization),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", _memory("total")),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", _memory("used")),
    (
        "nv_gpu_power_usage",
        "GPU power usage in watts",
        _thousandths("nvmlDeviceGetPowerUsage", ctypes.c_uint),
    ),
    (
        "nv_gpu_power_limit",
        "GPU power management limit in watts",
        _thousandths("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint),
    ),
)
