"""`slipstream lora`: the old hf_lora_convert.py. A PEFT adapter to the tensors that requests carry
it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import Parser
from slipstream.weights.lora import convert_adapter


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "slipstream lora", description="Turn a PEFT adapter into the tensors of a request."
    )
    parser.add_argument("-i", "--in-file", type=Path, required=True, help="The adapter's folder.")
    parser.add_argument("-o", "--out-dir", type=Path, required=True, help="Where the tensors go.")
    parser.add_argument("--storage-type", default="float16", help="float16 or float32.")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="Name each tensor that has no place."
    )
    given = parser.parse(arguments)
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
