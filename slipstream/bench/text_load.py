"""Load on a text model, as genai-perf generates it, and the files that it writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy

from slipstream.bench import llm_report
from slipstream.bench.llm_metrics import LlmMetrics, llm_metrics
from slipstream.bench.load import (
    Load,
    Measured,
    Sender,
    WindowRule,
    check_answers,
    measure,
)
from slipstream.bench.progress import shown_progress
from slipstream.bench.prompts import Lengths, synthetic_prompt
from slipstream.bench.tokenizer import TextTokenizer
from slipstream.client.connection import Request
from slipstream.client.declared_inputs import declared_inputs
from slipstream.client.tensors import Array
from slipstream.weights.whole_file import write_whole

_DEFAULT_OUTPUT_TOKENS = 256
# input of a text model: its name in the first releases
_OLD_NAMES = {
    "text_input": "INPUT_0",
    "max_tokens": "INPUT_1",
    "bad_words": "INPUT_2",
    "stop_words": "INPUT_3",
}

Row = dict[str, Any]  # the fields of one request, and its model


@dataclass(frozen=True)
class PromptSettings:
    """The prompts and answers of a load."""

    input_file: Path | None  # prompts; None: synthetic text
    num_prompts: int
    input_tokens: Lengths
    output_tokens: Lengths  # a mean that is not over 0: the default length
    fixed_output_length: bool  # asks for at least as many tokens, too
    random_seed: int
    streaming: bool
    extra_inputs: Mapping[str, str] = field(default_factory=dict)


class LoadLevel(NamedTuple):
    """One level of load: requests in flight, or requests a second."""

    concurrency: int
    request_rate: float | None = None

    @property
    def mode(self) -> str:
        return "request_rate" if self.request_rate else "concurrency"

    @property
    def value(self) -> float:
        return self.request_rate or self.concurrency

    @property
    def text(self) -> str:
        if self.request_rate:
            return f"{self.request_rate:g} requests a second"
        return f"{self.concurrency} in flight"

    @property
    def folder_name(self) -> str:
        return f"{self.mode}{self.value:g}"


class MeasuredModel(Protocol):
    """A text model of some protocol."""

    name: str
    text_output: str

    def input_name(self, field_name: str) -> str:
        """Return the model's own name of an input."""

    def request(self, row: Row, number: int) -> Request: ...


class TextModel:
    """The tensors of a text model, from its configuration."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        outputs = [tensor["name"] for tensor in config.get("output", [])]
        self.name = name
        self._inputs = declared_inputs(config)
        self.text_output = "text_output" if "text_output" in outputs else "OUTPUT_0"
        if self.input_name("text_input") not in self._inputs or self.text_output not in outputs:
            raise ValueError(
                f"model '{name}' does not take and give text; "
                "name an ensemble or a BLS model with -m, or measure this model with perf_analyzer"
            )

    def input_name(self, field_name: str) -> str:
        """Return the model's own name of an input."""
        if field_name in self._inputs:
            return field_name
        return _OLD_NAMES.get(field_name, field_name)

    def request(self, row: Row, number: int) -> Request:
        inputs = {
            self.input_name(name): self._tensor(name, value)
            for name, value in row.items()
            if name != "model"
        }
        for name, tensor in self._inputs.items():  # the first releases require word lists
            if name not in inputs and tensor.is_text and not tensor.optional:
                inputs[name] = tensor.fill("")
        return Request(self.name, inputs, request_id=str(number))

    def _tensor(self, field_name: str, value: Any) -> Array:
        tensor = self._inputs.get(self.input_name(field_name))
        if tensor is None:
            raise ValueError(f"model '{self.name}' has no input {field_name}")
        if tensor.is_text:
            return tensor.fill(str(value))
        if tensor.dtype == "bool":
            return tensor.fill(str(value).lower() in ("1", "true"))
        return tensor.fill(float(value) if "float" in tensor.dtype else int(value))


def create_rows(
    models: Sequence[str], settings: PromptSettings, tokenizer: TextTokenizer
) -> list[Row]:
    """Return the fields of every request. The models are used in turn."""
    generator = numpy.random.default_rng(settings.random_seed)
    rows: list[Row] = []
    for prompt in _prompts(settings, tokenizer, generator):
        length = settings.output_tokens.draw(generator)
        if settings.output_tokens.mean <= 0:
            length = _DEFAULT_OUTPUT_TOKENS
        row: Row = {
            "model": models[len(rows) % len(models)],
            "text_input": prompt,
            "max_tokens": length,
        }
        if settings.fixed_output_length:
            row["min_length"] = length
        if settings.streaming:
            row["stream"] = True
        rows.append({**row, **settings.extra_inputs})
    return rows


def _prompts(
    settings: PromptSettings, tokenizer: TextTokenizer, generator: numpy.random.Generator
) -> Iterator[str]:
    if settings.input_file is not None:
        yield from read_prompts(settings.input_file)
        return
    for _ in range(settings.num_prompts):
        length = settings.input_tokens.draw(generator)
        yield synthetic_prompt(length, tokenizer.encode, tokenizer.decode, generator)


def read_prompts(path: Path) -> Iterator[str]:
    """Yield the prompts of a file with a JSON object on each line, in `text_input` or `text`."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                document = json.loads(line)
                name = "text_input" if "text_input" in document else "text"
                yield str(document[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--input-file {path}: not a JSON object with text_input on each line: {error}"
        ) from error


class TextLoad:
    """Measures text models of a server under load."""

    def __init__(
        self, send: Sender, models: Iterable[MeasuredModel], tokenizer: TextTokenizer
    ) -> None:
        self._send = send
        self._models = {model.name: model for model in models}
        self._tokenizer = tokenizer

    def requests(self, rows: Sequence[Row]) -> list[Request]:
        return [self._models[row["model"]].request(row, number) for number, row in enumerate(rows)]

    def warm_up(self, requests: Sequence[Request], count: int) -> None:
        for request in itertools.islice(itertools.cycle(requests), count):
            check_answers([self._send(request)])

    def measure(
        self, requests: Sequence[Request], level: LoadLevel, count: int, windows: WindowRule
    ) -> Measured:
        """Measure `count` requests, or with 0, windows. Raises LoadError if a request fails."""
        endless: Iterator[Request] = itertools.cycle(requests)
        if count:
            endless = itertools.islice(endless, count)
        waits = itertools.repeat(1.0 / level.request_rate) if level.request_rate else None
        load = Load(self._send, endless, level.concurrency, waits)
        with shown_progress(load, count, windows):
            measured = measure(load, None if count else windows)
        return measured._replace(records=check_answers(measured.records))

    def metrics(self, measured: Measured, streaming: bool) -> LlmMetrics:
        model = next(iter(self._models.values()))
        return llm_metrics(
            measured.records,
            lambda text: len(self._tokenizer.encode(text)),
            streaming,
            (model.input_name("text_input"), model.text_output),
        )


class ArtifactFiles(NamedTuple):
    """The files of one level of load, in genai-perf's folder structure."""

    folder: Path
    profile_export_file: str
    service_kind: str = "triton"
    endpoint: str = ""

    def write(
        self,
        rows: Sequence[Row],
        measured: Measured,
        level: LoadLevel,
        metrics: LlmMetrics,
        options: Mapping[str, Any],
    ) -> list[tuple[str, Path]]:
        """Write the files and return the kind and the path of each report."""
        write_whole(self.folder / "llm_inputs.json", llm_report.inputs_document(rows))
        export = llm_report.profile_export(
            measured, level.mode, level.value, self.service_kind, self.endpoint
        )
        write_whole(self.folder / self.profile_export_file, export)
        reports = {
            "json": llm_report.json_report(metrics, options),
            "csv": llm_report.csv_report(metrics),
        }
        paths = []
        for kind, text in reports.items():
            path = self.folder / f"profile_export_genai_perf.{kind}"
            write_whole(path, text)
            paths.append((kind, path))
        return paths
