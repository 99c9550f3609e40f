"""`slipstream lora`: the old hf_lora_convert.py. Converts a PEFT adapter to request tensors."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.weights.lora import convert_adapter


def create_parser() -> Parser:
    parser = Parser("slipstream lora", "Convert a PEFT adapter to the tensors of a request.")
    parser.add_argument(
        "-i", "--in-file", type=Path, required=True, metavar="FOLDER", help="Folder of the adapter."
    )
    parser.add_argument(
        "-o", "--out-dir", type=Path, required=True, metavar="FOLDER", help="Folder to write to."
    )
    parser.add_argument(
        "--storage-type",
        default="float16",
        metavar="TYPE",
        help="Data type of the tensors: float16 or float32.",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="Print the name of each tensor that a request cannot carry.",
    )
    return parser


def run(given: Namespace) -> int:
    adapter = convert_adapter(given.in_file, given.out_dir, given.storage_type)
    if given.verbose:
        for name in adapter.skipped:
            print(f"[INFO] no match for {name}")
    if adapter.skipped:
        print(
            f"[WARNING] {len(adapter.skipped)} tensors have no place in a request and were left out"
        )
    modules, longest = adapter.weights.shape[1:]
    print(f"[INFO] {given.out_dir}: {modules} adapted modules, rows of {longest} values")
    return 0
