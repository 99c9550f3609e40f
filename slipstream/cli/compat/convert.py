"""`slipstream convert`: the old convert_checkpoint.py of every model."""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser, UsageError
from slipstream.cli.compat.classic_flags import add_flags, explain_flags, print_version_line
from slipstream.cli.progress import ProgressLines
from slipstream.weights.calibration.settings import DEFAULT_WINDOWS, METHODS, Calibration
from slipstream.weights.convert import DEFAULT_OUTPUT, Conversion, convert
from slipstream.weights.flags import CONVERT_FLAGS
from slipstream.weights.home import expand_home
from slipstream.weights.rank_split import RankMapping

PRECISIONS = ("int8", "int4", "fp8")
_OTHER_SPELLINGS = ("use_weight_only", "weight_only_precision")
_FP8_FLAGS = ("enable_fp8", "use_fp8", "use_fp8_rowwise")


def create_parser() -> Parser:
    parser = Parser("slipstream convert", "Convert a model's weights to a unified checkpoint.")
    add_quantize(parser)
    add_flags(parser, CONVERT_FLAGS)
    return parser


def add_quantize(parser: Parser) -> None:
    parser.add_argument(
        "--quantize",
        choices=[*METHODS, *PRECISIONS],
        default=argparse.SUPPRESS,
        help="Quantise the linear layers: awq and gptq to 4 bits, by what a text shows of their "
        "inputs; int4, int8 and fp8 to the nearest values (default: not quantised).",
    )


def run(given: Namespace) -> int:
    started = time.monotonic()
    print_version_line()
    explain_flags(CONVERT_FLAGS, given)
    if not hasattr(given, "model_dir"):
        raise UsageError("--model_dir is required: a Hugging Face folder, a GGUF file or a hub id")
    calibration = calibration_flags(given)
    wanted = Conversion(
        model=given.model_dir,
        output=expand_home(getattr(given, "output_dir", DEFAULT_OUTPUT), "--output_dir"),
        dtype=dtype_flag(given) or "float16",
        weight_only=weight_only_flag(given),
        fp8_kv_cache=hasattr(given, "fp8_kv_cache"),
        mapping=RankMapping(whole_number(given, "tp_size", 1), whole_number(given, "pp_size", 1)),
        config_only=hasattr(given, "save_config_only"),
        calibration=calibration,
    )
    with ProgressLines() as lines:
        converted = convert(wanted, lines.update)
    if not converted.wrote:
        print(f"[INFO] {converted.folder} holds this checkpoint already: nothing to do")
    elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - started))
    print(f"Total time of converting checkpoints: {elapsed}")
    return 0


def dtype_flag(given: Namespace) -> str | None:
    """Return the --dtype of the weights. With fp8, which is for the linears only, it is auto."""
    dtype = getattr(given, "dtype", None)
    return "auto" if dtype == "fp8" else dtype


def weight_only_flag(given: Namespace) -> str | None:
    """Return the quantised type of the linears, or None."""
    if hasattr(given, "quantize"):
        others = (*_OTHER_SPELLINGS, *_FP8_FLAGS)
        if other := next((name for name in others if hasattr(given, name)), None):
            raise CommandError(f"--quantize and --{other} exclude each other")
        return str(given.quantize)
    fp8 = next((f"--{name}" for name in _FP8_FLAGS if hasattr(given, name)), None)
    fp8 = fp8 or ("--dtype fp8" if getattr(given, "dtype", None) == "fp8" else None)
    if fp8 is not None:
        if hasattr(given, "use_weight_only"):
            raise CommandError(f"{fp8} and --use_weight_only exclude each other")
        return "fp8"
    if not hasattr(given, "use_weight_only"):
        return None
    precision = str(getattr(given, "weight_only_precision", "int8"))
    if precision not in PRECISIONS:
        raise CommandError(
            f"--weight_only_precision {precision} is not available; use {', '.join(PRECISIONS)}"
        )
    return precision


def calibration_flags(given: Namespace) -> Calibration | None:
    """Return the calibration that --quantize needs; None: it needs none."""
    method = getattr(given, "quantize", None)
    if method not in METHODS:
        for name in ("calib_dataset", "calib_size"):
            if hasattr(given, name):
                print(f"[INFO] --{name} has no effect: only awq and gptq are calibrated")
        return None
    text = getattr(given, "calib_dataset", None)
    windows = whole_number(given, "calib_size", DEFAULT_WINDOWS)
    return Calibration(method, None if text is None else Path(text), windows)


def whole_number(given: Namespace, name: str, default: int) -> int:
    """Return the value of a flag as a number of at least 1."""
    text = getattr(given, name, default)
    try:
        number = int(text)
    except ValueError:
        raise CommandError(f"--{name} takes a whole number, not '{text}'") from None
    if number < 1:
        raise CommandError(f"--{name} must be at least 1, not {number}")
    return number
