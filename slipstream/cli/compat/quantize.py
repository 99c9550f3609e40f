"""The old examples/quantization/quantize.py: writes a quantised checkpoint without calibration."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat import convert

# format: the flags of `slipstream convert` that give it
_FORMATS = {
    "fp8": ["--use_fp8"],
    "int8_wo": ["--use_weight_only", "--weight_only_precision", "int8"],
    "int4_wo": ["--use_weight_only", "--weight_only_precision", "int4"],
    "full_prec": [],
}
_CALIBRATED = ("int8_sq", "int4_awq", "w4a8_awq")
_CALIBRATION_FLAGS = (
    "--device",
    "--seed",
    "--max_seq_length",
    "--batch_size",
    "--calib_size",
    "--calib_dataset",
    "--awq_block_size",
)


def create_parser() -> Parser:
    parser = Parser("quantize.py", "Write a checkpoint with quantised linear layers.")
    parser.add_argument(
        "--model_dir", required=True, help="Hugging Face folder, GGUF file or hub id."
    )
    parser.add_argument("--output_dir", default="exported_model", help="Folder for the checkpoint.")
    parser.add_argument(
        "--dtype", default="float16", help="Data type of the layers that are not quantised."
    )
    parser.add_argument(
        "--qformat",
        default="full_prec",
        choices=[*_FORMATS, *_CALIBRATED],
        help="Format of the linear layers.",
    )
    parser.add_argument(
        "--kv_cache_dtype",
        choices=["int8", "fp8"],
        help="Data type of the KV cache; only fp8 is supported (default: the --dtype).",
    )
    parser.add_argument("--tp_size", default="1", help="Tensor-parallel ranks.")
    parser.add_argument("--pp_size", default="1", help="Pipeline-parallel ranks.")
    ignored = parser.no_effect_group()
    for name in _CALIBRATION_FLAGS:
        ignored.add_argument(name, help="Nothing is calibrated.")
    return parser


def run(given: Namespace) -> int:
    return convert.run(convert.create_parser().parse(list(_convert_flags(given))))


def _convert_flags(given: Namespace) -> Iterator[str]:
    if given.qformat in _CALIBRATED:
        raise CommandError(
            f"--qformat {given.qformat}: formats that need calibration are not available; "
            f"use {', '.join(_FORMATS)}"
        )
    if given.kv_cache_dtype == "int8":
        raise CommandError("--kv_cache_dtype int8 is not available; use fp8")
    for name in ("model_dir", "output_dir", "dtype", "tp_size", "pp_size"):
        yield from (f"--{name}", getattr(given, name))
    yield from _FORMATS[given.qformat]
    if given.kv_cache_dtype == "fp8":
        yield "--fp8_kv_cache"
