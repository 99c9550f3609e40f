"""`slipstream build`: trtllm-build, and the build.py that each model had before v0.8."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import Parser, add_flags, explain_flags
from slipstream.cli.compat.convert import dtype_of, weight_only_of, whole_number
from slipstream.cli.progress import ProgressLines
from slipstream.cli.versions import print_version_line
from slipstream.weights.classic_build import (
    DEFAULT_OUTPUT,
    LIMIT_NAMES,
    Build,
    build,
    read_build_config,
)
from slipstream.weights.flags import BUILD_FLAGS
from slipstream.weights.home import expanded


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream build", description="Build an engine folder from a checkpoint or a model."
    )
    add_flags(parser, BUILD_FLAGS)
    given = parser.parse(arguments)
    started = time.monotonic()
    print_version_line()
    explain_flags(BUILD_FLAGS, given)
    model = getattr(given, "checkpoint_dir", None) or getattr(given, "model_dir", None)
    if model is None:
        parser.error(
            "--checkpoint_dir is required: what slipstream convert wrote, or a model's folder"
        )
    wanted = Build(
        model=model,
        output=expanded(getattr(given, "output_dir", DEFAULT_OUTPUT), "--output_dir"),
        dtype=dtype_of(given) or ("float16" if hasattr(given, "model_dir") else None),
        weight_only=weight_only_of(given),
        fp8_kv_cache=hasattr(given, "fp8_kv_cache"),
        limits=_limits(given),
    )
    _say_one_device(given)
    with ProgressLines() as lines:
        built = build(wanted, lines.update)
    for note in built.notes:
        print(f"[WARNING] {note}")
    if not built.wrote:
        print(f"[INFO] {built.folder} holds this engine already: nothing to do")
    elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - started))
    print(f"[INFO] Total time of building all engines: {elapsed}")
    return 0


def _limits(given: Namespace) -> dict[str, int]:
    limits = read_build_config(Path(given.build_config)) if hasattr(given, "build_config") else {}
    if hasattr(given, "max_decoder_seq_len"):
        limits["max_seq_len"] = whole_number(given, "max_decoder_seq_len", 1)
    limits.update(
        {name: whole_number(given, name, 1) for name in LIMIT_NAMES if hasattr(given, name)}
    )
    return limits


def _say_one_device(given: Namespace) -> None:
    for name in ("world_size", "tp_size", "pp_size"):
        ranks = whole_number(given, name, 1)
        if ranks > 1:
            print(f"[WARNING] --{name} {ranks}: the engine is built whole, and runs on one device")
