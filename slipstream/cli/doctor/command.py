"""`slipstream doctor`: what a bug report needs, and what to look at first if something fails."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.cli.doctor.engines import engines
from slipstream.cli.doctor.machine import ask_torch, disks, gpus, processor, system, versions
from slipstream.cli.doctor.ports import ports
from slipstream.cli.doctor.ranks import ranks
from slipstream.cli.doctor.report import Finding, Report, Section, hide_in_variable, hider, is_proxy
from slipstream.repository.check import check_repository
from slipstream.repository.used_repositories import DEFAULT_REPOSITORY
from slipstream.server.engine_link.launched import (
    LAUNCHERS,
    RANK_VARIABLES,
    Launched,
    LaunchError,
    find_launch,
)
from slipstream.weights.home import expand_home

_VARIABLES = frozenset(
    {
        "GLIBC_TUNABLES",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "TMPDIR",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
        "MASTER_ADDR",
        "MASTER_PORT",
        *RANK_VARIABLES,
    }
)
_BEGINNINGS = (
    "CUDA_",
    "GOMP_",
    "GRPC_",
    "HF_",
    "HUGGING_FACE_",
    "HUGGINGFACE_",
    "KMP_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "DNNL_",
    "PYTORCH_",
    "SLIPSTREAM_",
    "TOKENIZERS_",
    "TORCH_",
    "TRITON_",
    "TRANSFORMERS_",
)


def create_parser() -> Parser:
    parser = Parser(
        "slipstream doctor", "Describe this machine and report what prevents it from serving."
    )
    parser.add_argument(
        "--model-repository",
        "--repo",
        "--model-store",
        type=Path,
        dest="repository",
        metavar="FOLDER",
        help=f"Folder that holds the models (default: {DEFAULT_REPOSITORY}).",
    )
    parser.add_argument("--json", action="store_true", help="Print the report as a JSON object.")
    return parser


def run(given: Namespace) -> int:
    report = examine(given.repository)
    print(json.dumps(report.document(), indent=2) if given.json else report.text())
    return 0 if report.ready else 1


def examine(repository: Path | None) -> Report:
    folder = expand_home(repository or DEFAULT_REPOSITORY, "--model-repository")
    torch = ask_torch()
    sections = [versions(torch), system(), processor(torch), gpus(torch)]
    sections += [ranks(torch, os.environ), disks(folder), ports()]
    sections.append(models(folder, asked_for=repository is not None))
    if os.path.isdir(folder):
        sections.append(engines(folder))
    sections.append(variables(os.environ))
    return Report(sections, hider())


def models(repository: Path, asked_for: bool) -> Section:
    """Return the problems of the repository, as `slipstream check` finds them."""
    # os.path.isdir raises nothing, unlike Path.is_dir
    if not asked_for and not os.path.isdir(repository):
        found = "not there: slipstream start imports a small model"
        return Section("model repository", {"folder": str(repository), "found": found})
    try:
        problems = check_repository(repository)
    except OSError as error:
        remedy = f"let this user read all of {repository}"
        facts = {"folder": str(repository), "found": "it cannot be read"}
        return Section(
            "model repository", facts, [Finding(f"the repository cannot be read: {error}", remedy)]
        )
    counts = f"{problems.count(fatal=True)} errors, {problems.count(fatal=False)} warnings"
    facts = {"folder": str(repository), "found": f"{counts} (slipstream check {repository})"}
    remedy = f"correct it, then: slipstream check {repository}"
    return Section(
        "model repository", facts, [Finding(str(problem), remedy) for problem in problems.errors]
    )


def variables(environment: Mapping[str, str]) -> Section:
    """Return the variables that change the behaviour of Slipstream and its libraries."""
    known = sorted((name, value) for name, value in environment.items() if _matters(name))
    facts = {name: hide_in_variable(name, " ".join(value.split())) for name, value in known}
    findings = []
    try:
        launched = find_launch(environment)
    except LaunchError:
        launched = Launched()  # the section on ranks reports it
    if launched.rank != 0:
        name = next(found.rank for found in LAUNCHERS if found.name == launched.launcher)
        what = f"{name} is {environment[name]}: tritonserver is not the server, but a further rank"
        remedy = f"unset {name} outside of {launched.launcher}"
        findings.append(Finding(what, remedy, blocks=False))
    return Section("environment", facts, findings)


def _matters(name: str) -> bool:
    return name in _VARIABLES or name.startswith(_BEGINNINGS) or is_proxy(name)
