"""The old examples/gpt/hf_gpt_convert.py: a checkpoint in DIR/<ranks>-gpu, for the build.py of its
time.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cli.arguments import Parser
from slipstream.cli.compat import convert


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "hf_gpt_convert.py", description="Turn a model's weights into a checkpoint for build.py."
    )
    parser.add_argument("-i", "--in-file", required=True, help="A Hugging Face folder.")
    parser.add_argument(
        "-o", "--out-dir", required=True, help="The checkpoint goes into <ranks>-gpu below it."
    )
    parser.add_argument(
        "-tp", "--tensor-parallelism", default="1", help="Ranks that share each layer."
    )
    parser.add_argument(
        "-t", "--storage-type", default="float32", help="float32, float16 or bfloat16."
    )
    parser.add_argument(
        "-p", "--processes", help="No effect: files are written as fast as the disk takes them."
    )
    parser.add_argument("--model", help="No effect: read from the model's own config.json.")
    parser.add_argument("--load-model-on-cpu", action="store_true", help="No effect.")
    parser.add_argument("--convert-model-on-cpu", action="store_true", help="No effect.")
    given = parser.parse(arguments)
    return convert.main(
        [
            "--model_dir",
            given.in_file,
            "--tp_size",
            given.tensor_parallelism,
            "--dtype",
            given.storage_type,
            "--output_dir",
            f"{given.out_dir}/{given.tensor_parallelism}-gpu",
        ]
    )
