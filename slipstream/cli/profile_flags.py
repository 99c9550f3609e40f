"""The flags of genai-perf, of every release that `triton profile` and the tutorials used."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.arguments import CommandError, Parser
from slipstream.version import VERSION

_WITHOUT_EFFECT_AFTER_DASHES = ("-v", "--verbose", "--max-threads", "--async")


def read_flags(arguments: Sequence[str]) -> Namespace:
    ours, after = _divided(list(arguments))
    parser = _parser()
    given = parser.parse(ours[1:] if ours[:1] == ["profile"] else ours)
    if given.version:
        print(f"genai-perf of slipstream {VERSION}")
        raise SystemExit(0)
    if not given.model:
        parser.error("-m is required: the model to ask")
    _refuse(given)
    for word in after:
        name = word.partition("=")[0]
        if name.startswith("-") and name not in _WITHOUT_EFFECT_AFTER_DASHES:
            raise CommandError(
                f"{name} after -- is not available: there is no perf_analyzer behind this command"
            )
    given.extra_inputs = _extra_inputs(given.extra_inputs)
    given.concurrency = given.concurrency or [1]
    return given


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _parser() -> Parser:
    parser = Parser(
        "slipstream bench",
        description="Put load on a text model and print what its clients feel of it. "
        "genai-perf and slipstream profile are the same command.",
    )
    add = parser.add_argument
    add(
        "-m",
        "--model",
        "--model-names",
        nargs="+",
        default=[],
        help="The text model, or several to ask in turn.",
    )
    add(
        "--model-selection-strategy",
        default="round_robin",
        choices=["round_robin"],
        help="In turn is the only way.",
    )
    add("--service-kind", default="triton", help="triton; other servers are not measured.")
    add("--endpoint-type", default="kserve", help="kserve; other protocols are not measured.")
    add(
        "--backend",
        default="tensorrtllm",
        choices=["tensorrtllm", "vllm"],
        help="Named in the results' folder.",
    )
    add("-u", "--url", default="localhost:8001", help="The server's gRPC address.")
    add(
        "--streaming",
        action="store_true",
        help="Ask for the answer piece by piece; needs a decoupled model.",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_loads,
        help="Requests in flight (default 1); 1,4,16: one after the other.",
    )
    load.add_argument(
        "--request-rate", type=float, help="Requests a second, however many are in flight."
    )
    add(
        "-p",
        "--measurement-interval",
        type=float,
        default=10000,
        help="Milliseconds of one of three windows.",
    )
    add(
        "-s",
        "--stability-percentage",
        type=float,
        default=999,
        help="How far three windows may differ; else more.",
    )
    add(
        "--request-count",
        type=int,
        default=0,
        help="Send so many requests instead of measuring in windows.",
    )
    add(
        "--warmup-request-count",
        type=int,
        default=0,
        help="Requests before that, which do not count.",
    )
    _add_prompts(parser)
    add(
        "--tokenizer",
        help="A folder or a hub id; default: the server's own text models count the tokens.",
    )
    add(
        "--artifact-dir",
        type=Path,
        default=Path("artifacts"),
        help="The folder for the results' folder.",
    )
    add(
        "--profile-export-file",
        default="profile_export.json",
        help="The file of every request's times in it.",
    )
    add("--generate-plots", action="store_true", help="Draw the figures, as one page of HTML.")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="No effect: everything there is to say is said.",
    )
    add("--version", action="store_true", help="Print the version.")
    return parser


def _add_prompts(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--input-file",
        type=Path,
        help="Prompts: a JSON object with text_input a line. Default: made-up text.",
    )
    add("--input-dataset", help="Refused: nothing is downloaded; give --input-file.")
    add(
        "--num-prompts",
        "--num-dataset-entries",
        type=_at_least_one,
        default=100,
        help="How many different prompts.",
    )
    add(
        "--synthetic-input-tokens-mean",
        "--isl",
        type=float,
        default=550,
        help="Tokens of a made-up prompt.",
    )
    add("--synthetic-input-tokens-stddev", type=float, default=0, help="How much that differs.")
    add(
        "--output-tokens-mean",
        "--osl",
        type=float,
        default=-1,
        help="Tokens to ask for; default: 256.",
    )
    add("--output-tokens-stddev", type=float, default=0, help="How much that differs.")
    add(
        "--output-tokens-mean-deterministic",
        action="store_true",
        help="Ask for at least as many, too.",
    )
    add(
        "--random-seed",
        type=int,
        default=0,
        help="The same seed gives the same prompts and lengths.",
    )
    add(
        "--extra-inputs",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="A further tensor of each request.",
    )
    add(
        "-b",
        "--batch-size",
        "--batch-size-text",
        type=int,
        default=1,
        help="1: a text model is asked one by one.",
    )


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def _loads(text: str) -> list[int]:
    numbers = [_at_least_one(part) for part in text.split(",")]
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"must hold each number once, not {text}")
    return numbers


def _refuse(given: Namespace) -> None:
    if given.service_kind != "triton" or given.endpoint_type not in ("kserve", "generate"):
        flag, value = (
            ("--service-kind", given.service_kind)
            if given.service_kind != "triton"
            else ("--endpoint-type", given.endpoint_type)
        )
        raise CommandError(f"{flag} {value}: only Triton's protocol is measured here; leave it out")
    if given.input_dataset is not None:
        raise CommandError(
            "--input-dataset: nothing is downloaded; give the prompts with --input-file"
        )
    if given.batch_size != 1:
        raise CommandError(
            "--batch-size: a text model is asked one prompt at a time; raise --concurrency instead"
        )
    if given.request_rate is not None and given.request_rate <= 0:
        raise CommandError(f"--request-rate must be over 0, not {given.request_rate:g}")
    if Path(given.profile_export_file).name != given.profile_export_file:
        raise CommandError("--profile-export-file is a bare file name; --artifact-dir says where")


def _extra_inputs(pairs: list[str]) -> dict[str, str]:
    inputs = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon:
            raise CommandError(f"--extra-inputs takes name:value, not '{pair}'")
        inputs[name] = value
    return inputs
