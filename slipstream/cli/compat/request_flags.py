"""Request options that several of the tutorials' clients share."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.cli.arguments import ArgumentContainer

PENALTIES = {
    "repetition_penalty": "Divide positive logits of tokens already present by this",
    "presence_penalty": "Subtract this from the logits of tokens already generated",
    "frequency_penalty": "Subtract this, times their count, from the logits of generated tokens",
}


# field of a text model: type and description of its option
SAMPLING: Mapping[str, tuple[type, str]] = {
    "temperature": (
        float,
        "Divide the logits by this; no effect without top-k or top-p (default: 1).",
    ),
    "top_k": (int, "Sample from this many most likely tokens (default: greedy)."),
    "top_p": (float, "Sample from the most likely tokens with this total probability."),
}


def add_sampling(parser: ArgumentContainer) -> None:
    """Add the options that sample. A temperature alone is greedy, as on upstream's server."""
    for name, (kind, text) in SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def add_penalties(parser: ArgumentContainer) -> None:
    for name, text in PENALTIES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            metavar="VALUE",
            help=f"{text} (default: the server's).",
        )


def add_token_ids(parser: ArgumentContainer) -> None:
    for name, token in (("end", "end-of-text"), ("pad", "padding")):
        parser.add_argument(
            f"--{name}-id",
            type=int,
            metavar="ID",
            help=f"Id of the {token} token (default: the tokenizer's).",
        )


def add_gpt_sampling(parser: ArgumentContainer) -> None:
    """Add the sampling options of the scripts in tools/gpt."""
    parser.add_argument(
        "-beam", "--beam_width", type=int, default=1, help="Number of beams of a beam search."
    )
    parser.add_argument(
        "-topk",
        "--topk",
        type=int,
        default=1,
        help="Sample from this many most likely tokens; 1: greedy.",
    )
    parser.add_argument(
        "-topp",
        "--topp",
        type=float,
        default=0.0,
        help="Sample from the most likely tokens with this total probability; 0: all tokens.",
    )
    add_output_length(parser)


def add_output_length(parser: ArgumentContainer) -> None:
    parser.add_argument(
        "-o",
        "--output_len",
        type=int,
        default=10,
        metavar="TOKENS",
        help="Maximum number of tokens to generate.",
    )
