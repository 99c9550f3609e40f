"""`slipstream build`: trtllm-build, and the build.py that each model had before v0.8."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import Parser, UsageError
from slipstream.cli.compat.classic_flags import add_flags, explain_flags, print_version_line
from slipstream.cli.compat.convert import (
    add_quantize,
    calibration_flags,
    dtype_flag,
    weight_only_flag,
    whole_number,
)
from slipstream.cli.progress import ProgressLines
from slipstream.weights.classic_build import (
    DEFAULT_OUTPUT,
    LIMIT_NAMES,
    BuildFlags,
    build,
    read_build_config,
)
from slipstream.weights.flags import BUILD_FLAGS
from slipstream.weights.home import expand_home


def create_parser() -> Parser:
    parser = Parser(
        "slipstream build",
        "Build an engine folder from a checkpoint (--checkpoint_dir) or a model (--model_dir).",
    )
    add_quantize(parser)
    add_flags(parser, BUILD_FLAGS)
    return parser


def run(given: Namespace) -> int:
    started = time.monotonic()
    print_version_line()
    explain_flags(BUILD_FLAGS, given)
    wanted = _build_settings(given)
    with ProgressLines() as lines:
        built = build(wanted, lines.update)
    for note in built.notes:
        print(f"[WARNING] {note}")
    if not built.wrote:
        print(f"[INFO] {built.folder} holds this engine already: nothing to do")
    elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - started))
    print(f"[INFO] Total time of building all engines: {elapsed}")
    return 0


def _build_settings(given: Namespace) -> BuildFlags:
    model = getattr(given, "checkpoint_dir", None) or getattr(given, "model_dir", None)
    if model is None:
        raise UsageError(
            "--checkpoint_dir is required: the output of slipstream convert, or a model's folder"
        )
    return BuildFlags(
        model=model,
        output=expand_home(getattr(given, "output_dir", DEFAULT_OUTPUT), "--output_dir"),
        dtype=dtype_flag(given) or ("float16" if hasattr(given, "model_dir") else None),
        weight_only=weight_only_flag(given),
        calibration=calibration_flags(given),
        fp8_kv_cache=hasattr(given, "fp8_kv_cache"),
        limits=_limits(given),
        ranks=_ranks(given),
        stages=whole_number(given, "pp_size", 1),
    )


def _limits(given: Namespace) -> dict[str, int]:
    limits = read_build_config(Path(given.build_config)) if hasattr(given, "build_config") else {}
    if hasattr(given, "max_decoder_seq_len"):
        limits["max_seq_len"] = whole_number(given, "max_decoder_seq_len", 1)
    for name in LIMIT_NAMES:
        if hasattr(given, name):
            limits[name] = whole_number(given, name, 1)
    return limits


def _ranks(given: Namespace) -> int:
    """Return the number of ranks that the flags want: --world_size, or --tp_size × --pp_size."""
    product = whole_number(given, "tp_size", 1) * whole_number(given, "pp_size", 1)
    return max(product, whole_number(given, "world_size", 1))
