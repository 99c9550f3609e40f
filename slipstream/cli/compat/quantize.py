"""The old examples/quantization/quantize.py: a checkpoint with fewer bits, and no calibration."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from slipstream.cli.arguments import CommandError, Parser
from slipstream.cli.compat import convert

# What each format is of the flags of `slipstream convert`.
_FORMATS = {
    "fp8": ["--use_fp8"],
    "int8_wo": ["--use_weight_only", "--weight_only_precision", "int8"],
    "int4_wo": ["--use_weight_only", "--weight_only_precision", "int4"],
    "full_prec": [],
}
_CALIBRATED = ("int8_sq", "int4_awq", "w4a8_awq")
_WITHOUT_EFFECT = (
    "--device",
    "--seed",
    "--max_seq_length",
    "--batch_size",
    "--calib_size",
    "--calib_dataset",
    "--awq_block_size",
)


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse(arguments)
    return convert.main(list(_flags(given)))


def _parser() -> Parser:
    parser = Parser(
        "quantize.py", description="Write a checkpoint whose linears are kept in fewer bits."
    )
    parser.add_argument(
        "--model_dir", required=True, help="A Hugging Face folder, a GGUF file or a hub id."
    )
    parser.add_argument("--output_dir", default="exported_model", help="Where the checkpoint goes.")
    parser.add_argument("--dtype", default="float16", help="Of what is not quantised.")
    parser.add_argument(
        "--qformat", default="full_prec", choices=[*_FORMATS, *_CALIBRATED], help="How."
    )
    parser.add_argument(
        "--kv_cache_dtype", choices=["int8", "fp8"], help="fp8: keys and values too."
    )
    parser.add_argument("--tp_size", default="1", help="Ranks that share each layer.")
    parser.add_argument("--pp_size", default="1", help="Ranks that each hold some of the layers.")
    for name in _WITHOUT_EFFECT:
        parser.add_argument(name, help="No effect: nothing is calibrated.")
    return parser


def _flags(given: Namespace) -> Iterator[str]:
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
