"""The old examples/quantization/quantize.py: writes a checkpoint that a build quantises."""

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
    "int4_awq": ["--quantize", "awq"],
    "int4_gptq": ["--quantize", "gptq"],
    "full_prec": [],
}
_UNAVAILABLE = ("int8_sq", "w4a8_awq")
_WITHOUT_EFFECT = {
    "--device": "Calibration runs on a CPU.",
    "--seed": "Nothing is random.",
    "--max_seq_length": "Calibration runs windows of 512 tokens.",
    "--calib_max_seq_length": "Calibration runs windows of 512 tokens.",
    "--batch_size": "Calibration runs one window at a time.",
    "--awq_block_size": "Groups hold 32 weights.",
}


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
        choices=[*_FORMATS, *_UNAVAILABLE],
        help="Format of the linear layers.",
    )
    parser.add_argument(
        "--kv_cache_dtype",
        choices=["int8", "fp8"],
        help="Data type of the KV cache; only fp8 is supported (default: the --dtype).",
    )
    parser.add_argument("--tp_size", default="1", help="Tensor-parallel ranks.")
    parser.add_argument("--pp_size", default="1", help="Pipeline-parallel ranks.")
    parser.add_argument(
        "--calib_size",
        help="Most windows of 512 tokens of the calibration text that are run (default: 128).",
    )
    parser.add_argument(
        "--calib_dataset",
        help="Text file that int4_awq and int4_gptq observe the model on (default: a text of the "
        "package).",
    )
    ignored = parser.no_effect_group()
    for name, reason in _WITHOUT_EFFECT.items():
        ignored.add_argument(name, help=reason)
    return parser


def run(given: Namespace) -> int:
    return convert.run(convert.create_parser().parse(list(_convert_flags(given))))


def _convert_flags(given: Namespace) -> Iterator[str]:
    if given.qformat in _UNAVAILABLE:
        raise CommandError(f"--qformat {given.qformat} is not available; use {', '.join(_FORMATS)}")
    if given.kv_cache_dtype == "int8":
        raise CommandError("--kv_cache_dtype int8 is not available; use fp8")
    for name in ("model_dir", "output_dir", "dtype", "tp_size", "pp_size"):
        yield from (f"--{name}", getattr(given, name))
    yield from _FORMATS[given.qformat]
    for name in ("calib_size", "calib_dataset"):
        if (value := getattr(given, name)) is not None:
            yield from (f"--{name}", value)
    if given.kv_cache_dtype == "fp8":
        yield "--fp8_kv_cache"
