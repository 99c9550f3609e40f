"""What ranks of an engine need, as `slipstream doctor` describes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.cli.doctor.machine import TorchReport
from slipstream.cli.doctor.report import Finding, Section
from slipstream.server.engine_link.cluster.address import AddressError, leader_address, resolve
from slipstream.server.engine_link.cluster.key import (
    CLUSTER_KEY_FILE_VARIABLE,
    CLUSTER_KEY_VARIABLE,
    ClusterKeyError,
    read_cluster_key,
)
from slipstream.server.engine_link.launched import Launched, LaunchError, find_launch

_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 1 << 30
_MIB = 1 << 20


def ranks(
    torch: TorchReport, environment: Mapping[str, str], shared_memory: Path = _SHARED_MEMORY
) -> Section:
    """Return what ranks on this machine and on others would meet."""
    try:
        launched = find_launch(environment)
        findings: list[Finding] = []
    except LaunchError as error:
        launched = Launched()
        findings = [Finding("the place of this process is not known", str(error))]
    size = shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else 0
    several = len(torch.found.get("gpus", ())) > 1
    facts = {
        "GPUs that reach each other": _describe_reach(torch),
        "NCCL": torch.found.get("nccl") or "none",
        "shared memory": f"{size // _MIB} MiB at {shared_memory}",
        "cluster key": _describe_key(environment),
    }
    if launched.launcher:
        facts["launcher"] = (
            f"{launched.launcher}: process {launched.rank} of {launched.size}, "
            f"{launched.elsewhere} on other machines"
        )
    findings += [*_gpu_findings(torch), *_cluster_findings(launched, environment)]
    if size < _LITTLE_SHARED_MEMORY and (several or launched.size > 1):
        what = f"{shared_memory} has {size // _MIB} MiB, and NCCL may need 1 GiB for several ranks"
        remedy = "give the container more, such as docker run --shm-size=2g"
        findings.append(Finding(what, remedy, blocks=False))
    return Section("ranks", facts, findings)


def _describe_reach(torch: TorchReport) -> str:
    count = len(torch.found.get("gpus", ()))
    if count < 2:
        return "one GPU" if count else "no GPU"
    pairs = torch.found.get("unreachable", ())
    return "all but " + ", ".join(f"{a} and {b}" for a, b in pairs) if pairs else "all"


def _describe_key(environment: Mapping[str, str]) -> str:
    if environment.get(CLUSTER_KEY_FILE_VARIABLE):
        return f"from {CLUSTER_KEY_FILE_VARIABLE}"
    return f"from {CLUSTER_KEY_VARIABLE}" if environment.get(CLUSTER_KEY_VARIABLE) else "none"


def _gpu_findings(torch: TorchReport) -> Iterator[Finding]:
    for first, second in torch.found.get("unreachable", ()):
        what = f"GPU {first} and GPU {second} cannot read each other's memory: ranks are slower"
        yield Finding(what, "put the ranks of an engine on other GPUs", blocks=False)


def _cluster_findings(launched: Launched, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what prevents ranks on several machines."""
    given = CLUSTER_KEY_VARIABLE in environment or CLUSTER_KEY_FILE_VARIABLE in environment
    if launched.elsewhere or given:
        try:
            read_cluster_key(environment=environment)
        except ClusterKeyError as error:
            what = "the cluster key cannot be used" if given else "the cluster key is missing"
            yield Finding(what, str(error), blocks=launched.elsewhere > 0)
    address = environment.get("MASTER_ADDR", "")
    try:
        if launched.elsewhere:
            address = leader_address(launched, environment).host
        if address:
            resolve(address)
    except AddressError as error:
        remedy = "set MASTER_ADDR to an address of the machine of rank 0"
        yield Finding(str(error), remedy, blocks=launched.elsewhere > 0)
