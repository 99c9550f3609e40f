"""`slipstream bench`, `profile` and the old `genai-perf`: load on a text model.

It has the flags of genai-perf, of every release that `triton profile` and the tutorials used.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench import plots, tables
from slipstream.bench.load import Sender, WindowRule, stream_sender
from slipstream.bench.openai_load import ENDPOINTS, OpenAIModel, openai_sender
from slipstream.bench.plots import Run
from slipstream.bench.prompts import Lengths
from slipstream.bench.text_load import (
    ArtifactFiles,
    LoadLevel,
    MeasuredModel,
    PromptSettings,
    Row,
    TextLoad,
    TextModel,
    create_rows,
)
from slipstream.bench.tokenizer import (
    LocalTextTokenizer,
    ServerTextTokenizer,
    TextTokenizer,
    WordTokenizer,
)
from slipstream.cli.arguments import CommandError, Parser, UsageError, add_verbose, at_least
from slipstream.cli.compat.passed_flags import read_passed_flags
from slipstream.cli.connections import PORTS, closing_connection, connect
from slipstream.cli.log import log
from slipstream.client.connection import (
    Connection,
    GrpcConnection,
    HttpConnection,
    Request,
    ServerError,
)
from slipstream.kernels.cpu.machine import read_cpu
from slipstream.version import VERSION
from slipstream.weights.home import expand_home
from slipstream.weights.whole_file import write_whole


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


def _check(given: Namespace) -> None:
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


def run(given: Namespace) -> int:
    if given.compare:
        tables.print_comparison(given.compare)
        return 0
    _check(given)
    settings = _prompt_settings(given)
    levels = [LoadLevel(number, given.request_rate) for number in given.concurrency]
    connection = connect("http" if given.service_kind == "openai" else "grpc", given.url)
    with closing_connection(connection):
        models, send = _measured_models(given, connection)
        tokenizer = _tokenizer(given, connection)
        load = TextLoad(send, models, tokenizer)
        rows = create_rows(given.model, settings, tokenizer)
        requests = load.requests(rows)
        runs = [_run_level(given, load, level, rows, requests) for level in levels]
    if len(runs) > 1:
        lines = [tables.LoadRow(run.load, run.metrics) for run in runs]
        tables.print_loads(_load_unit(given), lines)
    if given.generate_plots:
        _write_plots(given, levels, runs)
    return 0


def _measured_models(
    given: Namespace, connection: Connection
) -> tuple[list[MeasuredModel], Sender]:
    if isinstance(connection, HttpConnection):
        openai = [OpenAIModel(name, given.endpoint_type) for name in given.model]
        return list(openai), openai_sender(connection, given.endpoint)
    assert isinstance(connection, GrpcConnection)
    models = [TextModel(name, connection.config(name)) for name in given.model]
    return list(models), stream_sender(connection)


def _prompt_settings(given: Namespace) -> PromptSettings:
    return PromptSettings(
        given.input_file,
        int(given.num_prompts),
        Lengths(given.synthetic_input_tokens_mean, given.synthetic_input_tokens_stddev),
        Lengths(given.output_tokens_mean, given.output_tokens_stddev),
        given.output_tokens_mean_deterministic,
        given.random_seed,
        given.streaming,
        _extra_inputs(given.extra_inputs),
    )


def _extra_inputs(pairs: list[str]) -> dict[str, str]:
    inputs = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon:
            raise CommandError(f"--extra-inputs takes name:value, not '{pair}'")
        inputs[name] = value
    return inputs


def _tokenizer(given: Namespace, connection: Connection) -> TextTokenizer:
    if given.tokenizer is None:
        try:
            return ServerTextTokenizer(connection)
        except ServerError as error:
            log(
                "WARNING",
                f"words are counted, not tokens: the server has no preprocessing model ({error}); "
                "give --tokenizer, a folder or a hub id, to count tokens",
            )
            return WordTokenizer()
    from slipstream.server.text.tokenizer import Tokenizer

    folder = expand_home(given.tokenizer, "--tokenizer")
    if not folder.is_dir():
        from slipstream.weights.sources.hub import fetch_tokenizer

        folder = fetch_tokenizer(given.tokenizer)
    return LocalTextTokenizer(Tokenizer.load(folder))


def _run_level(
    given: Namespace,
    load: TextLoad,
    level: LoadLevel,
    rows: Sequence[Row],
    requests: Sequence[Request],
) -> Run:
    load.warm_up(requests, given.warmup_request_count)
    print(f"[INFO] Measuring {_describe(given, level)}.", flush=True)
    windows = WindowRule(
        given.measurement_interval / 1000, given.stability_percentage / 100, given.max_trials
    )
    measured = load.measure(requests, level, given.request_count, windows)
    metrics = load.metrics(measured, given.streaming)
    tables.print_metrics(metrics)
    files = ArtifactFiles(
        _folder(given, level.folder_name),
        given.profile_export_file,
        given.service_kind,
        given.endpoint or "",
    )
    options = {
        **vars(given),
        "concurrency": level.concurrency,
        "extra_inputs": _extra_inputs(given.extra_inputs),
    }
    for kind, path in files.write(rows, measured, level, metrics, options):
        print(
            f"{time.strftime('%Y-%m-%d %H:%M')} [INFO] "
            f"genai_perf.export_data.{kind}_exporter - Generating {path}"
        )
    return Run(level.text, level.value, measured.records, metrics)


def _describe(given: Namespace, level: LoadLevel) -> str:
    if given.request_count:
        return f"{given.request_count} requests, {level.text}"
    seconds = given.measurement_interval / 1000
    return f"with {level.text}, in at least three windows of {seconds:g} s"


def _folder(given: Namespace, load: str) -> Path:
    name = "_".join(given.model).replace("/", "_")
    what = given.endpoint_type if given.service_kind == "openai" else given.backend
    folder: Path = given.artifact_dir / f"{name}-{given.service_kind}-{what}-{load}"
    return folder


def _write_plots(given: Namespace, levels: Sequence[LoadLevel], runs: Sequence[Run]) -> None:
    """Write a page in the folder of the level, or of several levels, beside their folders."""
    if len(runs) == 1:
        path = _folder(given, levels[0].folder_name) / "plots.html"
    else:
        numbers = ",".join(str(level.concurrency) for level in levels)
        path = _folder(given, f"concurrency{numbers}.html")
    title = f"{', '.join(given.model)} at {given.url}"
    write_whole(path, plots.page(title, _load_unit(given), runs, _facts(given)))
    print(f"[INFO] Plots: {path}", flush=True)


def _load_unit(given: Namespace) -> str:
    return "requests a second" if given.request_rate else "requests in flight"


def _facts(given: Namespace) -> list[tuple[str, str]]:
    """Return what a reader of the page must know about the measurement."""
    processor = read_cpu()[0] or platform.machine()
    machine = f"{processor}, {len(os.sched_getaffinity(0))} cores, {platform.release()}"
    return [
        ("Date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
        ("Load generator", f"slipstream bench {VERSION}"),
        ("Its machine", machine),
        ("API", f"{given.endpoint_type}{', streaming' if given.streaming else ''}"),
    ]
