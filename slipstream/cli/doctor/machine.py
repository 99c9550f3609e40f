"""The machine, as `slipstream doctor` describes it: versions, system, CPU, GPUs and disks."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream.cli.doctor.report import Finding, Section
from slipstream.engine.memory.cores import usable_cores
from slipstream.engine.memory.host import read_host_memory
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
from slipstream.engine_worker.code_trial import choose_code, explain_code
from slipstream.kernels.cpu.machine import read_cpu
from slipstream.server.engine_link.child import child_environment
from slipstream.server.metrics.machine import nvidia_driver
from slipstream.version import VERSION
from slipstream.weights.home import hugging_face_cache, slipstream_home

_GIB = 1 << 30
_TORCH_SECONDS = 180.0
_NEEDED = ("torch", "tokenizers", "numpy")
_LITTLE_DISK = 2 * _GIB
_LITTLE_MEMORY = _GIB
_NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class TorchReport:
    """The output of `torch_probe`, or why there is none."""

    found: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def ask_torch() -> TorchReport:
    """Run `torch_probe` in a process of its own and return its report."""
    command = [sys.executable, "-P", "-m", "slipstream.cli.doctor.torch_probe"]
    try:
        asked = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return TorchReport(failure=f"it does not load within {_TORCH_SECONDS:g} s")
    if asked.returncode != 0:
        said = asked.stderr.strip().rpartition("\n")[2]
        return TorchReport(failure=said or f"its process ended with {asked.returncode}")
    last = asked.stdout.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return TorchReport(
            failure=f"its process ended without an answer; the last it printed is '{last}'"
        )
    return TorchReport(found)


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def versions(torch: TorchReport) -> Section:
    facts = {
        "slipstream": VERSION,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "torch": installed("torch"),
        "Triton": installed("triton"),
        "CUDA runtime": torch.found.get("cuda_runtime", "unknown")
        or "none: torch is a build for CPUs",
        "CUDA driver": _driver_version(),
        "tokenizers": installed("tokenizers"),
        "numpy": installed("numpy"),
    }
    findings = [
        Finding(f"{name} is not installed", f"pip install {name}")
        for name in _NEEDED
        if facts[name] == _NOT_INSTALLED
    ]
    if torch.failure and facts["torch"] != _NOT_INSTALLED:
        findings.append(
            Finding(f"torch does not load: {torch.failure}", "pip install --force-reinstall torch")
        )
    return Section("versions", facts, findings)


def _driver_version() -> str:
    driver = nvidia_driver()
    if driver is None:
        return "none"
    text = ctypes.create_string_buffer(80)
    newest = ctypes.c_int()
    driver.nvmlSystemGetDriverVersion(text, 80)
    driver.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(newest))
    return (
        f"{text.value.decode()}, for CUDA up to {newest.value // 1000}.{newest.value % 1000 // 10}"
    )


def system() -> Section:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:  # a bare container has no such file
        name = platform.system()
    return Section("system", {"OS": name, "kernel": f"{platform.release()} {platform.machine()}"})


def processor(torch: TorchReport) -> Section:
    model, flags = read_cpu()
    found = read_host_memory()
    facts = {
        "model": model or "unknown",
        "cores": f"{usable_cores():g} usable of {os.cpu_count()}",
        "memory": f"{_gib(found.available)} available of {_gib(found.total)}",
        "instructions": torch.found.get("cpu_instructions", "unknown"),
    }
    facts["compiled code"] = explain_code(choose_code(cpu=(model, flags)))
    if not torch.failure:
        choice = cpu_probe.choose(cpu=(model, flags))
        facts["torch computes in"] = f"{choice.dtype}: {cpu_probe.explain(choice, flags)}"
    findings = []
    if found.available < _LITTLE_MEMORY:
        remedy = "end other programs, or take a smaller model"
        findings.append(
            Finding(f"only {_gib(found.available)} of memory is available", remedy, blocks=False)
        )
    return Section("CPU", facts, findings)


def gpus(torch: TorchReport, driver: Path = Path("/dev/nvidiactl")) -> Section:
    facts = {}
    findings = []
    for index, gpu in enumerate(torch.found.get("gpus", ())):
        facts[f"GPU {index}"] = gpu["name"]
        facts[f"GPU {index} compute capability"] = gpu["capability"]
        if gpu["failure"]:
            facts[f"GPU {index} kernels"] = f"do not run: {gpu['failure']}"
            remedy = (
                "start with --device cpu, or install the driver and the torch that fit each other"
            )
            findings.append(Finding(f"kernels do not run on GPU {index}: {gpu['failure']}", remedy))
            continue
        facts[f"GPU {index} memory"] = f"{_gib(gpu['free'])} free of {_gib(gpu['total'])}"
        facts[f"GPU {index} kernels"] = "run"
    if not facts:
        facts["GPUs"] = "none" if driver.exists() else "none: there is no NVIDIA driver"
        if driver.exists() and torch.found:
            findings.append(_no_gpu_seen(torch))
    if not torch.failure:
        facts["engines run on"] = "CPU" if cpu_probe.runs_on_cpu(EngineSettings()) else "GPU"
    return Section("GPU", facts, findings)


def _no_gpu_seen(torch: TorchReport) -> Finding:
    if not torch.found["cuda_runtime"]:
        remedy = "install torch's build for CUDA to use it"
        return Finding(
            "there is an NVIDIA driver, but torch is a build for CPUs", remedy, blocks=False
        )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return Finding(
            f"torch sees no GPU: CUDA_VISIBLE_DEVICES is '{shown}'",
            "unset it, or start with --device cpu",
        )
    version = torch.found["cuda_runtime"]
    remedy = f"update the driver to one for CUDA {version}, or start with --device cpu"
    return Finding("there is an NVIDIA driver, but torch sees no GPU", remedy)


def disks(repository: Path) -> Section:
    places = {
        "cache": (slipstream_home(), "SLIPSTREAM_HOME"),
        "hub cache": (hugging_face_cache(), "HF_HUB_CACHE"),
        "repository": (repository, "--model-repository"),
        "temporary files": (Path(tempfile.gettempdir()), "TMPDIR"),
    }
    facts = {}
    findings = []
    for name, (path, setting) in places.items():
        # os.path.exists is false in a folder that this user may not search; Path.exists raises
        existing = next(
            folder for folder in (path, *path.absolute().parents) if os.path.exists(folder)
        )
        free = shutil.disk_usage(existing).free
        facts[name] = f"{path}, {_gib(free)} free"
        if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
            what = f"the folder for the {name}, {path}, cannot be written"
            findings.append(
                Finding(
                    what,
                    f"change its permissions, or name another with {setting}",
                    blocks=name == "temporary files",
                )
            )
        elif free < _LITTLE_DISK:
            what = f"only {_gib(free)} are free for the {name} at {path}"
            findings.append(
                Finding(what, f"free some room, or name another place with {setting}", blocks=False)
            )
    return Section("disk", facts, findings)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
