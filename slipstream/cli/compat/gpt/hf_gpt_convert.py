"""The old examples/gpt/hf_gpt_convert.py: writes a checkpoint for the build.py of its time."""

from __future__ import annotations

from argparse import Namespace

from slipstream.cli.arguments import NO_EFFECT, Parser
from slipstream.cli.compat import convert


def create_parser() -> Parser:
    parser = Parser("hf_gpt_convert.py", "Convert a model's weights to a checkpoint for build.py.")
    parser.add_argument(
        "-i", "--in-file", required=True, metavar="FOLDER", help="Hugging Face folder to convert."
    )
    parser.add_argument(
        "-o",
        "--out-dir",
        required=True,
        metavar="FOLDER",
        help="Output folder; the checkpoint is written to its sub-folder <ranks>-gpu.",
    )
    parser.add_argument(
        "-tp", "--tensor-parallelism", default="1", metavar="RANKS", help="Tensor-parallel ranks."
    )
    parser.add_argument(
        "-t",
        "--storage-type",
        default="float32",
        metavar="TYPE",
        help="Data type of the checkpoint: float32, float16 or bfloat16.",
    )
    ignored = parser.no_effect_group()
    ignored.add_argument("-p", "--processes", help="Weights are written by one process.")
    ignored.add_argument("--model", help="The model type is read from config.json.")
    for name in ("--load-model-on-cpu", "--convert-model-on-cpu"):
        ignored.add_argument(name, action="store_true", help=NO_EFFECT)
    return parser


def run(given: Namespace) -> int:
    flags = {
        "--model_dir": given.in_file,
        "--tp_size": given.tensor_parallelism,
        "--dtype": given.storage_type,
        "--output_dir": f"{given.out_dir}/{given.tensor_parallelism}-gpu",
    }
    words = [word for flag in flags.items() for word in flag]
    return convert.run(convert.create_parser().parse(words))
