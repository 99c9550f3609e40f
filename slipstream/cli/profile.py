"""`slipstream bench`, `profile` and the old `genai-perf`: load on a text model, and what its
clients feel of it.
"""

from __future__ import annotations

import itertools
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from slipstream.bench import llm_report, plots
from slipstream.bench.llm_metrics import llm_metrics
from slipstream.bench.load import (
    Load,
    Measured,
    Record,
    WindowRule,
    measure_all,
    measure_windows,
    stream_sender,
)
from slipstream.bench.plots import Run
from slipstream.bench.synthetic import Lengths, synthetic_prompt
from slipstream.bench.words import OwnWords, Words, WordsOfServer
from slipstream.cli.arguments import CommandError
from slipstream.cli.connections import connect_grpc
from slipstream.cli.profile_flags import read_flags
from slipstream.client.connection import GrpcConnection, Request, ServerError
from slipstream.client.tensors import Array
from slipstream.weights.home import expanded
from slipstream.weights.whole_file import write_whole

_DEFAULT_ANSWER = 256  # tokens asked for where --output-tokens-mean is not given
_NUMPY_TYPES = {
    "TYPE_INT32": "int32",
    "TYPE_UINT32": "uint32",
    "TYPE_INT64": "int64",
    "TYPE_UINT64": "uint64",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
}
_OLD_NAMES = {
    "text_input": "INPUT_0",
    "max_tokens": "INPUT_1",
    "bad_words": "INPUT_2",
    "stop_words": "INPUT_3",
}
_MOST_WINDOWS = 10


def main(arguments: Sequence[str]) -> int:
    given = read_flags(arguments)
    connection = connect_grpc(given.url)
    try:
        models = {name: _TextModel(name, connection.config(name)) for name in given.model}
        words = _words(given, connection)
        rows = _rows(given, words)
        requests = [_request(models, row, number) for number, row in enumerate(rows)]
        runs = []
        for concurrency in given.concurrency:
            one = Namespace(**{**vars(given), "concurrency": concurrency})
            runs.append(_run(one, connection, models[given.model[0]], words, rows, requests))
    except ServerError as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    if given.generate_plots:
        _draw(given, runs)
    return 0


def _run(
    given: Namespace,
    connection: GrpcConnection,
    model: _TextModel,
    words: Words,
    rows: list[dict[str, Any]],
    requests: list[Request],
) -> Run:
    measured = _measure(given, connection, requests)
    good = _good(measured.records)
    metrics = llm_metrics(
        good,
        lambda text: len(words.encode(text)),
        given.streaming,
        (model.named("text_input"), model.text_output),
    )
    llm_report.print_table(metrics)
    _write_files(given, rows, measured._replace(records=good), metrics)
    return Run(_load_text(given), given.request_rate or given.concurrency, good, metrics)


def _draw(given: Namespace, runs: Sequence[Run]) -> None:
    """Of several loads, one page beside their folders; of one, a page in its folder."""
    loads = Namespace(**{**vars(given), "concurrency": ",".join(map(str, given.concurrency))})
    folder = _folder(loads)
    path = folder / "plots.html" if len(runs) == 1 else folder.with_name(f"{folder.name}.html")
    across = "requests a second" if given.request_rate else "requests in flight"
    write_whole(path, plots.page(f"{', '.join(given.model)} at {given.url}", across, runs))
    print(f"[INFO] Drawn: {path}", flush=True)


class _TextModel:
    """The tensors a text model takes, from its configuration."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.types = {tensor["name"]: tensor["data_type"] for tensor in config.get("input", [])}
        self.required = [
            tensor["name"] for tensor in config.get("input", []) if not tensor.get("optional")
        ]
        outputs = [tensor["name"] for tensor in config.get("output", [])]
        self.text_output = "text_output" if "text_output" in outputs else "OUTPUT_0"
        if self.named("text_input") not in self.types or self.text_output not in outputs:
            raise CommandError(
                f"model '{name}' does not take and give text; name an ensemble or a BLS model with -m"
            )

    def named(self, field: str) -> str:
        return field if field in self.types else _OLD_NAMES.get(field, field)

    def tensor(self, field: str, value: Any) -> Array:
        kind = self.types.get(self.named(field))
        if kind is None:
            raise CommandError(f"model '{self.name}' has no input {field}")
        if kind == "TYPE_STRING":
            return numpy.array([[str(value).encode()]], dtype=object)
        if kind == "TYPE_BOOL":
            return numpy.array([[str(value).lower() in ("1", "true")]])
        return numpy.array(
            [[float(value) if "FP" in kind else int(value)]], dtype=_NUMPY_TYPES[kind]
        )


def _words(given: Namespace, connection: GrpcConnection) -> Words:
    if given.tokenizer is None:
        try:
            return WordsOfServer(connection)
        except ServerError as error:
            raise CommandError(
                f"the server has no text models to count tokens with ({error}); "
                "give --tokenizer, a folder or a hub id"
            ) from error
    from slipstream.server.text.tokenizer import Tokenizer

    folder = expanded(given.tokenizer, "--tokenizer")
    if not folder.is_dir():
        from slipstream.weights.sources.hub import fetch_tokenizer

        folder = fetch_tokenizer(given.tokenizer)
    return OwnWords(Tokenizer.load(folder))


def _rows(given: Namespace, words: Words) -> list[dict[str, Any]]:
    """What to ask, request by request, by field names."""
    generator = numpy.random.default_rng(given.random_seed)
    rows: list[dict[str, Any]] = []
    for prompt in _prompts(given, words, generator):
        row: dict[str, Any] = {
            "model": given.model[len(rows) % len(given.model)],
            "text_input": prompt,
        }
        length = Lengths(given.output_tokens_mean, given.output_tokens_stddev).draw(generator)
        row["max_tokens"] = length if given.output_tokens_mean > 0 else _DEFAULT_ANSWER
        if given.output_tokens_mean_deterministic:
            row["min_length"] = row["max_tokens"]
        if given.streaming:
            row["stream"] = True
        rows.append({**row, **given.extra_inputs})
    return rows


def _prompts(given: Namespace, words: Words, generator: numpy.random.Generator) -> Iterator[str]:
    if given.input_file is not None:
        yield from _prompts_of_file(given.input_file)
        return
    lengths = Lengths(given.synthetic_input_tokens_mean, given.synthetic_input_tokens_stddev)
    for _ in range(given.num_prompts):
        yield synthetic_prompt(lengths.draw(generator), words.encode, words.decode, generator)


def _prompts_of_file(path: Path) -> Iterator[str]:
    """A JSON object a line, with `text_input` or `text`."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for line in lines:
            document = json.loads(line)
            yield str(document["text_input"] if "text_input" in document else document["text"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--input-file {path}: not a JSON object with text_input on each line: {error}"
        ) from error


def _request(models: dict[str, _TextModel], row: dict[str, Any], number: int) -> Request:
    model = models[row["model"]]
    inputs = {
        model.named(field): model.tensor(field, value)
        for field, value in row.items()
        if field != "model"
    }
    for name in model.required:  # the word lists of the first releases
        if name not in inputs and model.types[name] == "TYPE_STRING":
            inputs[name] = numpy.array([[b""]], dtype=object)
    return Request(model.name, inputs, request_id=str(number))


def _measure(given: Namespace, connection: GrpcConnection, requests: list[Request]) -> Measured:
    send = stream_sender(connection)
    for request in itertools.islice(itertools.cycle(requests), given.warmup_request_count):
        _good([send(request)])
    print(f"[INFO] Measuring {_plan(given)}.", flush=True)
    endless: Iterator[Request] = itertools.cycle(requests)
    if given.request_count:
        endless = itertools.islice(endless, given.request_count)
    waits = itertools.repeat(1.0 / given.request_rate) if given.request_rate else None
    load = Load(send, endless, given.concurrency, waits)
    if given.request_count:
        return measure_all(load)
    rule = WindowRule(
        given.measurement_interval / 1000, given.stability_percentage / 100, _MOST_WINDOWS
    )
    try:
        return measure_windows(load, rule)
    finally:
        load.close()


def _load_text(given: Namespace) -> str:
    return (
        f"{given.request_rate:g} requests a second"
        if given.request_rate
        else f"{given.concurrency} in flight"
    )


def _plan(given: Namespace) -> str:
    load = _load_text(given)
    if given.request_count:
        return f"{given.request_count} requests, {load}"
    return f"with {load}, in windows of {given.measurement_interval / 1000:g} s, three at least"


def _good(records: Sequence[Record]) -> list[Record]:
    failed = [record.error for record in records if record.error]
    if failed:
        raise CommandError(
            f"{len(failed)} of {len(records)} requests failed; the first: {failed[0]}"
        )
    if not records:
        raise CommandError(
            "nothing was answered; give a longer --measurement-interval or --request-count"
        )
    return list(records)


def _folder(given: Namespace) -> Path:
    load = (
        f"request_rate{given.request_rate:g}"
        if given.request_rate
        else f"concurrency{given.concurrency}"
    )
    name = "_".join(given.model).replace("/", "_")
    folder: Path = given.artifact_dir / f"{name}-{given.service_kind}-{given.backend}-{load}"
    return folder


def _write_files(
    given: Namespace, rows: list[dict[str, Any]], measured: Measured, metrics: Any
) -> None:
    folder = _folder(given)
    mode, value = (
        ("request_rate", given.request_rate)
        if given.request_rate
        else ("concurrency", given.concurrency)
    )
    write_whole(folder / "llm_inputs.json", llm_report.inputs_document(rows))
    write_whole(
        folder / given.profile_export_file, llm_report.profile_export(measured, mode, value)
    )
    for kind, text in (
        ("json", llm_report.json_report(metrics, vars(given))),
        ("csv", llm_report.csv_report(metrics)),
    ):
        path = folder / f"profile_export_genai_perf.{kind}"
        write_whole(path, text)
        print(
            f"{time.strftime('%Y-%m-%d %H:%M')} [INFO] genai_perf.export_data.{kind}_exporter - Generating {path}"
        )
