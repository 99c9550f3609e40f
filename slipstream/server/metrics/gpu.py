"""Figures of the GPUs, asked of the driver's own library. Where there is no driver, there are none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.server.metrics.families import Family

_OK = 0
_UUID_BYTES = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    """The driver's second version, where memory it keeps for itself is not counted as used."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    def __init__(self, driver: Any = None) -> None:
        """`driver`: the library to ask; the machine's own where none is given."""
        self._driver = driver or nvidia_driver()
        self._handles: dict[str, ctypes.c_void_p] = {}  # by the GPU's unique name
        if self._driver is not None:
            self._handles = dict(_devices(self._driver))
        self._energy_before = {
            uuid: _energy(self._driver, handle) for uuid, handle in self._handles.items()
        }

    def families(self) -> Iterator[Family]:
        """What each GPU tells. One that does not know a figure is left out of its family."""
        for name, kind, text, read in _FIGURES:
            samples = []
            for uuid, handle in self._handles.items():
                value = read(self._driver, handle)
                if value is not None:
                    samples.append(({"gpu_uuid": uuid}, value))
            if samples:
                yield Family(name, kind, text, samples)
        if used := list(self._energy()):
            text = "GPU energy consumption in joules since the Triton Server started"
            yield Family("nv_energy_consumption", "counter", text, used)

    def _energy(self) -> Iterator[tuple[dict[str, str], float]]:
        """The driver counts since it was loaded; what is asked for is since the server's start."""
        for uuid, handle in self._handles.items():
            before, now = self._energy_before[uuid], _energy(self._driver, handle)
            if before is not None and now is not None:
                yield {"gpu_uuid": uuid}, now - before


def nvidia_driver() -> ctypes.CDLL | None:
    """The driver's library, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None  # no driver on this machine, so no GPU to tell of
    return library if library.nvmlInit_v2() == _OK else None


def _devices(driver: ctypes.CDLL) -> Iterator[tuple[str, ctypes.c_void_p]]:
    count = ctypes.c_uint()
    if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
        return
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        found = driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _OK
        if found and driver.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES) == _OK:
            yield uuid.value.decode(), handle


def _utilization(driver: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
    found = _Utilization()
    known = driver.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == _OK
    return found.gpu / 100 if known else None


def _memory(field: str) -> Callable[[ctypes.CDLL, ctypes.c_void_p], float | None]:
    def read(driver: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
        found = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        known = driver.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(found)) == _OK
        return int(getattr(found, field)) if known else None

    return read


def _thousandths(
    function: str, kind: type[ctypes.c_uint] | type[ctypes.c_ulonglong]
) -> Callable[..., float | None]:
    """A figure the driver gives in milliwatts or millijoules."""

    def read(driver: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
        found = kind()
        known = getattr(driver, function)(handle, ctypes.byref(found)) == _OK
        return found.value / 1000 if known else None

    return read


_energy = _thousandths("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
_FIGURES: tuple[tuple[str, str, str, Callable[..., float | None]], ...] = (
    ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)", _utilization),
    ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes", _memory("total")),
    ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes", _memory("used")),
    (
        "nv_gpu_power_usage",
        "gauge",
        "GPU power usage in watts",
        _thousandths("nvmlDeviceGetPowerUsage", ctypes.c_uint),
    ),
    (
        "nv_gpu_power_limit",
        "gauge",
        "GPU power management limit in watts",
        _thousandths("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint),
    ),
)
