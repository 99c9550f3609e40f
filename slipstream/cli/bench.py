"""`slipstream bench`, `profile` and the old `genai-perf`: load on a text model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.bench import sweep, tables
from slipstream.bench.load import LoadError, Sender, WindowRule, stream_sender
from slipstream.bench.openai_load import OpenAIModel, openai_sender
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
from slipstream.cli.arguments import CommandError
from slipstream.cli.bench_flags import check, create_parser
from slipstream.cli.bench_report import describe_server, level_folder, load_unit, write_plots
from slipstream.cli.connections import closing_connection, connect
from slipstream.cli.log import log
from slipstream.client.connection import (
    Connection,
    GrpcConnection,
    HttpConnection,
    Request,
    ServerError,
)
from slipstream.weights.home import expand_home

__all__ = ["create_parser", "run"]

AnnounceFile = Callable[[str, Path], None]  # kind and path of a report


def announce_file(kind: str, path: Path) -> None:
    print(f"[INFO] Wrote {path}")


def run(given: Namespace, announce: AnnounceFile = announce_file) -> int:
    if given.compare:
        tables.print_comparison(given.compare)
        return 0
    check(given)
    settings = _prompt_settings(given)
    connection = connect("http" if given.service_kind == "openai" else "grpc", given.url)
    with closing_connection(connection):
        models, send = _measured_models(given, connection)
        tokenizer = _tokenizer(given, connection)
        load = TextLoad(send, models, tokenizer)
        rows = create_rows(given.model, settings, tokenizer)
        bench = Bench(given, load, rows, announce)
        met = bench.search() if given.slo else bench.run_levels()
        server = describe_server(connection) if given.generate_plots else ""
    bench.report(server)
    return 0 if met else 1


class Bench:
    """Measures levels of load, one after the other."""

    def __init__(
        self, given: Namespace, load: TextLoad, rows: Sequence[Row], announce: AnnounceFile
    ) -> None:
        self._given = given
        self._load = load
        self._rows = rows
        self._requests: list[Request] = load.requests(rows)
        self._announce = announce
        self._measured: list[tuple[LoadLevel, Run]] = []
        self._verdict = ""  # of a search

    def run_levels(self) -> bool:
        for number in self._given.concurrency:
            self._run(LoadLevel(number, self._given.request_rate))
        return True

    def search(self) -> bool:
        """Find the highest load that meets the limits. Returns whether there is one."""
        given = self._given
        rate = given.request_rate
        knee = sweep.find_knee(
            self._meets, rate or given.concurrency[0], given.slo_max, whole=rate is None
        )
        limits = ", ".join(objective.text for objective in given.slo)
        if knee is None:
            self._verdict = f"No load meets {limits}: the first one already does not"
            return False
        level, run = next(pair for pair in self._measured if pair[0].value == knee)
        self._verdict = (
            f"Highest load that meets {limits}: {level.text}, "
            f"{run.metrics.output_tokens_per_second:,.1f} tokens/s"
        )
        if knee >= given.slo_max:
            self._verdict += f"; higher loads were not tried (--slo-max {given.slo_max})"
        return True

    def _meets(self, load: float) -> bool:
        given = self._given
        level = LoadLevel(1, load) if given.request_rate else LoadLevel(int(load))
        try:
            run = self._run(level)
        except LoadError as error:
            if not self._measured:
                raise  # nothing works, whatever the load
            print(f"[INFO] {level.text}: too much: {error}", flush=True)
            return False
        problems = sweep.broken(given.slo, run.metrics)
        verdict = f"too much: {', '.join(problems)}" if problems else "meets the limits"
        print(f"[INFO] {level.text}: {verdict}", flush=True)
        return not problems

    def _run(self, level: LoadLevel) -> Run:
        given = self._given
        load = self._load
        load.warm_up(self._requests, given.warmup_request_count)
        print(f"[INFO] Measuring {_describe(given, level)}.", flush=True)
        windows = WindowRule(
            given.measurement_interval / 1000, given.stability_percentage / 100, given.max_trials
        )
        measured = load.measure(self._requests, level, given.request_count, windows)
        metrics = load.metrics(measured, given.streaming)
        tables.print_metrics(metrics)
        files = ArtifactFiles(
            level_folder(given, level.folder_name),
            given.profile_export_file,
            given.service_kind,
            given.endpoint or "",
        )
        options = {
            **vars(given),
            "concurrency": level.concurrency,
            "request_rate": level.request_rate,
            "extra_inputs": _extra_inputs(given.extra_inputs),
            "slo": [objective.text for objective in given.slo or ()],
        }
        for kind, path in files.write(self._rows, measured, level, metrics, options):
            self._announce(kind, path)
        run = Run(level.text, level.value, measured.records, metrics)
        self._measured.append((level, run))
        return run

    def report(self, server: str) -> None:
        """Print the levels side by side, and write the page if it was requested."""
        given = self._given
        measured = sorted(self._measured, key=lambda pair: pair[0].value)
        levels = [level for level, _ in measured]
        runs = [run for _, run in measured]
        if len(runs) > 1:
            lines = [tables.LoadRow(run.load, run.metrics) for run in runs]
            tables.print_loads(load_unit(given), lines)
        if given.generate_plots:
            write_plots(given, levels, runs, server)
        if self._verdict:
            print(f"[INFO] {self._verdict}.", flush=True)


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


def _describe(given: Namespace, level: LoadLevel) -> str:
    if given.request_count:
        return f"{given.request_count} requests, {level.text}"
    seconds = given.measurement_interval / 1000
    return f"with {level.text}, in at least three windows of {seconds:g} s"
