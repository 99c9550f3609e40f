"""The flags of `slipstream bench`: those of genai-perf, and --slo."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.openai_load import ENDPOINTS
from slipstream.bench.sweep import Objective, parse_objectives
from slipstream.cli.arguments import CommandError, Parser, UsageError, add_verbose, at_least
from slipstream.cli.compat.passed_flags import read_passed_flags
from slipstream.cli.connections import PORTS
from slipstream.version import VERSION


class _BenchParser(Parser):
    """Accepts `profile` as the first word, and perf_analyzer's flags after `--`."""

    def parse(self, arguments: Sequence[str]) -> Namespace:
        words = list(arguments)
        if words[:1] == ["profile"]:
            del words[0]
        if "--" not in words:
            return super().parse(words)
        position = words.index("--")
        given = super().parse(words[:position])
        for name, value in read_passed_flags(words[position + 1 :], self.prog).items():
            setattr(given, name, value)
        return given


def create_parser() -> Parser:
    parser = _BenchParser(
        "slipstream bench",
        "Put load on a text model and measure latency and throughput as its clients see them. "
        "genai-perf and slipstream profile are the same command.",
    )
    add = parser.add_argument
    add(
        "-m",
        "--model",
        "--model-names",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="Text model; several are used in turn.",
    )
    add(
        "-u",
        "--url",
        metavar="HOST:PORT",
        help="Address of the server: gRPC (default: localhost:8001), or HTTP for OpenAI's API "
        "(default: localhost:8000).",
    )
    add(
        "--streaming",
        action="store_true",
        help="Receive the text as it is generated; needs a decoupled model.",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="Folder or hub id of a tokenizer that counts tokens (default: the server's).",
    )
    _add_protocol(parser)
    _add_load(parser)
    _add_search(parser)
    _add_prompts(parser)
    _add_answers(parser)
    _add_files(parser)
    _add_fixed(parser)
    add(
        "--version",
        action="version",
        version=f"genai-perf of slipstream {VERSION}",
        help="Print the version and exit.",
    )
    return parser


def _add_protocol(parser: Parser) -> None:
    add = parser.group("protocol").add_argument
    add(
        "--service-kind",
        choices=["triton", "openai"],
        help="API of the server (default: that of --endpoint-type).",
    )
    add(
        "--endpoint-type",
        choices=["kserve", "generate", *ENDPOINTS],
        help="kserve or generate: Triton's gRPC protocol; chat or completions: OpenAI's API "
        "(default: kserve).",
    )
    add("--endpoint", metavar="PATH", help="Path of OpenAI's API (default: that of its type).")


def _add_load(parser: Parser) -> None:
    load = parser.alternatives()
    load.add_argument(
        "--concurrency",
        type=_concurrency_levels,
        default=[1],
        metavar="REQUESTS",
        help="Requests in flight; 1,4,16: measure each of these (default: 1).",
    )
    load.add_argument(
        "--request-rate", type=float, metavar="RATE", help="Send this many requests a second."
    )
    add = parser.group("measurement").add_argument
    add(
        "-p",
        "--measurement-interval",
        type=float,
        default=10000,
        metavar="MILLISECONDS",
        help="Length of a window; at least three are measured.",
    )
    add(
        "-s",
        "--stability-percentage",
        type=float,
        default=999,
        metavar="PERCENT",
        help="Measure until three windows differ from their mean by at most this.",
    )
    add("--max-trials", type=at_least(1, int), default=10, help="Maximum number of windows.")
    add(
        "--request-count",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="Send this many requests; 0: measure in windows.",
    )
    add(
        "--warmup-request-count",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="Requests at the beginning that are not measured.",
    )


def _add_search(parser: Parser) -> None:
    add = parser.group("search").add_argument
    add(
        "--slo",
        type=_objectives,
        metavar="LIMITS",
        help="Find the highest load that meets limits in ms, such as ttft=500,itl=50 or "
        "latency.p90=2000 (default statistic: p99). The search begins at --concurrency, or at "
        "--request-rate if it is given.",
    )
    add(
        "--slo-max",
        type=at_least(1, int),
        default=1024,
        metavar="LOAD",
        help="Highest load that --slo tries.",
    )


def _add_prompts(parser: Parser) -> None:
    add = parser.group("prompts").add_argument
    add(
        "--input-file",
        type=Path,
        metavar="FILE",
        help="Prompts: a JSON object with text_input on each line (default: synthetic text).",
    )
    add(
        "--num-prompts",
        "--num-dataset-entries",
        type=at_least(1, int),
        default=100,
        metavar="N",
        help="Number of different synthetic prompts.",
    )
    add(
        "--synthetic-input-tokens-mean",
        "--isl",
        type=float,
        default=550,
        metavar="TOKENS",
        help="Mean length of synthetic prompts.",
    )
    add(
        "--synthetic-input-tokens-stddev",
        type=float,
        default=0,
        metavar="TOKENS",
        help="Standard deviation of these lengths.",
    )
    add("--random-seed", type=int, default=0, help="Seed of the prompts and lengths.")
    add(
        "--extra-inputs",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="Further input of every request, such as top_p:0.9; can be repeated.",
    )


def _add_answers(parser: Parser) -> None:
    add = parser.group("answers").add_argument
    add(
        "--output-tokens-mean",
        "--osl",
        type=float,
        default=-1,
        metavar="TOKENS",
        help="Mean of the maximum number of tokens to generate (default: 256).",
    )
    add(
        "--output-tokens-stddev",
        type=float,
        default=0,
        metavar="TOKENS",
        help="Standard deviation of this number.",
    )
    add(
        "--output-tokens-mean-deterministic",
        action="store_true",
        help="Make this number the minimum, too.",
    )


def _add_files(parser: Parser) -> None:
    add = parser.group("files").add_argument
    add(
        "--artifact-dir",
        type=Path,
        default=Path("artifacts"),
        metavar="FOLDER",
        help="Folder in which the folder of the results is written.",
    )
    add(
        "--profile-export-file",
        default="profile_export.json",
        metavar="NAME",
        help="Name of the file with the times of every request.",
    )
    add("--generate-plots", action="store_true", help="Write an HTML page with plots.")
    add(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="Measure nothing; print these reports (profile_export_genai_perf.json) side by side.",
    )


def _add_fixed(parser: Parser) -> None:
    add = parser.group("options with one supported value").add_argument
    add(
        "--model-selection-strategy",
        default="round_robin",
        choices=["round_robin"],
        help="How several models share the requests.",
    )
    add(
        "--backend",
        default="tensorrtllm",
        choices=["tensorrtllm", "vllm"],
        help="Part of the name of the results' folder; otherwise no effect.",
    )
    add(
        "-b",
        "--batch-size",
        "--batch-size-text",
        type=int,
        default=1,
        metavar="N",
        help="Prompts per request; must be 1.",
    )
    add("--input-dataset", metavar="NAME", help="Not supported; use --input-file.")
    add_verbose(parser.no_effect_group())


def _concurrency_levels(text: str) -> list[int]:
    numbers = [int(at_least(1, int)(part)) for part in text.split(",")]
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"must hold each number once, not {text}")
    return numbers


def _objectives(text: str) -> tuple[Objective, ...]:
    try:
        return parse_objectives(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check(given: Namespace) -> None:
    """Refuse flags that do not fit together, and set the protocol's defaults."""
    if given.slo:
        _check_search(given)
    if not given.model:
        raise UsageError("-m is required: the name of the text model")
    _choose_protocol(given)
    if given.input_dataset is not None:
        raise CommandError(
            "--input-dataset: nothing is downloaded; give the prompts with --input-file"
        )
    if given.batch_size != 1:
        raise CommandError(
            "--batch-size: a text model takes one prompt at a time; raise --concurrency instead"
        )
    if given.request_rate is not None and given.request_rate <= 0:
        raise CommandError(f"--request-rate must be over 0, not {given.request_rate:g}")
    if Path(given.profile_export_file).name != given.profile_export_file:
        raise CommandError("--profile-export-file is a bare file name; --artifact-dir says where")


def _check_search(given: Namespace) -> None:
    first = given.request_rate or given.concurrency[0]
    if len(given.concurrency) > 1:
        raise UsageError("--slo searches from one --concurrency: give one number")
    if first > given.slo_max:
        raise UsageError(f"--slo-max {given.slo_max} is below the first load, {first:g}")
    needed = [found.option for found in given.slo if found.streamed]
    if needed and not given.streaming:
        raise UsageError(f"--slo {needed[0]} needs --streaming: other answers come in one piece")


def _choose_protocol(given: Namespace) -> None:
    """Set the kind of server, the endpoint and the address that were left out."""
    kind = "openai" if given.endpoint_type in ENDPOINTS else "triton"
    if given.service_kind == "openai" and kind == "triton":
        raise CommandError("--service-kind openai needs --endpoint-type chat or completions")
    if given.service_kind not in (None, kind):
        raise CommandError(f"--endpoint-type {given.endpoint_type} needs --service-kind {kind}")
    if given.endpoint is not None and kind == "triton":
        raise CommandError("--endpoint needs --endpoint-type chat or completions")
    given.service_kind = kind
    given.endpoint_type = given.endpoint_type or "kserve"
    if kind == "openai":
        given.endpoint = (given.endpoint or ENDPOINTS[given.endpoint_type]).lstrip("/")
    given.url = given.url or f"localhost:{PORTS['http' if kind == 'openai' else 'grpc']}"
