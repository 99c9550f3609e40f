"""Load generators of others, where installed: `vllm bench serve`, aiperf and genai-perf.

Each runs one load against OpenAI's completions and writes a file, which is read here. Their prompts
are their own random texts of the same length.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.cells import COMPLETIONS, Cell, Figures, Spread
from serving.load import Target

OWN = "own"
_LIMIT_SECONDS = 900.0


class ClientFailed(Exception):
    """A client failed. The text has the end of its output."""


@dataclass(frozen=True)
class Run:
    """One load for a client: where the server is, and a folder for the files."""

    target: Target
    cell: Cell
    tokenizer: Path
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.target.http_port}"


@dataclass(frozen=True)
class ThirdParty:
    """A load generator: its program, its arguments, and how its result is read."""

    name: str
    program: str
    arguments: Callable[[Run], list[str]]
    read: Callable[[Run], dict[str, Any]]
    # aiperf asks the hub's library for the tokenizer's folder, which refuses to look in this mode
    is_offline: bool = True

    def measure(self, server: str, run: Run) -> Figures:
        run.folder.mkdir(parents=True, exist_ok=True)
        log = run.folder / "log"
        environment = os.environ | {"NO_COLOR": "1"}
        if self.is_offline:
            environment["HF_HUB_OFFLINE"] = "1"
        with log.open("wb") as output:
            done = subprocess.run(
                [self.program, *self.arguments(run)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        if done.returncode:
            text = log.read_text(errors="replace")
            raise ClientFailed(f"{self.name} ended with code {done.returncode}: {text[-600:]}")
        return Figures(server, self.name, run.cell, **self.read(run))


def _vllm_arguments(run: Run) -> list[str]:
    cell = run.cell
    sampling = ["--temperature", str(cell.sampling["temperature"])]
    if "top_p" in cell.sampling:
        sampling += ["--top-p", str(cell.sampling["top_p"])]
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", run.url),
        *("--model", run.target.model, "--tokenizer", str(run.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", str(cell.prompt_tokens)),
        *("--random-output-len", str(cell.output_tokens), "--num-prompts", str(cell.requests)),
        *("--max-concurrency", str(cell.requests if cell.rate else cell.concurrency)),
        *("--request-rate", str(cell.rate or "inf"), "--ignore-eos", "--seed", str(cell.seed)),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"),
        *("--save-result", "--result-dir", str(run.folder), "--result-filename", "result.json"),
        *sampling,
    ]


def _read_vllm(run: Run) -> dict[str, Any]:
    found = json.loads((run.folder / "result.json").read_text())
    failed = int(found.get("failed", run.cell.requests - found["completed"]))
    return {
        "tokens_per_second": found["output_throughput"],
        "requests_per_second": found["request_throughput"],
        "ttft": _vllm_spread(found, "ttft"),
        "itl": _vllm_spread(found, "itl"),
        "tpot": found["mean_tpot_ms"],
        "seconds": found["duration"],
        "completed": found["completed"],
        "errors": [f"{failed} requests failed"] if failed else [],
    }


def _vllm_spread(found: Mapping[str, Any], name: str) -> Spread:
    return Spread(found[f"mean_{name}_ms"], found[f"median_{name}_ms"], found[f"p99_{name}_ms"])


def _aiperf_arguments(run: Run) -> list[str]:
    cell = run.cell
    extra = [("ignore_eos", "true"), *cell.sampling.items()]
    load = ["--concurrency", str(cell.concurrency)]
    if cell.rate:
        load = ["--request-rate", str(cell.rate), "--arrival-pattern", "poisson"]
    arguments = [
        *("profile", "--model", run.target.model, "--url", run.url),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(run.tokenizer)),
        *("--isl", str(cell.prompt_tokens), "--osl", str(cell.output_tokens)),
        *("--request-count", str(cell.requests), "--num-prompts", str(cell.requests), *load),
        *("--random-seed", str(cell.seed), "--ui", "none", "--artifact-dir", str(run.folder)),
        *("--export-level", "summary", "--use-server-token-count"),
    ]
    for name, value in extra:
        arguments += ["--extra-inputs", f"{name}:{value}"]
    return arguments


def _read_genai(run: Run, pattern: str) -> dict[str, Any]:
    """Read the report that genai-perf and aiperf write."""
    path = next(iter(run.folder.rglob(pattern)), None)
    if path is None:
        raise ClientFailed(f"{run.folder}: no {pattern} was written")
    found = json.loads(path.read_text())
    completed = int(found.get("request_count", {}).get("avg", run.cell.requests))
    failed = int(found.get("error_request_count", {}).get("avg", 0))
    return {
        "tokens_per_second": found["output_token_throughput"]["avg"],
        "requests_per_second": found["request_throughput"]["avg"],
        "ttft": _genai_spread(found, "time_to_first_token"),
        # genai-perf's inter-token latency is one mean per request
        "itl": _genai_spread(found, "inter_token_latency"),
        "tpot": found.get("inter_token_latency", {}).get("avg"),
        "completed": completed,
        "errors": [f"{failed} requests failed"] if failed else [],
        "note": "ITL: one mean per request",
    }


def _genai_spread(found: Mapping[str, Any], name: str) -> Spread | None:
    one = found.get(name)
    return Spread(one["avg"], one["p50"], one["p99"]) if one else None


def _genai_arguments(run: Run) -> list[str]:
    cell = run.cell
    load = ["--concurrency", str(cell.concurrency)]
    if cell.rate:
        load = ["--request-rate", str(cell.rate)]
    arguments = [
        *("profile", "-m", run.target.model, "-u", run.url, "--endpoint-type", "completions"),
        *("--streaming", "--tokenizer", str(run.tokenizer), *load),
        *("--synthetic-input-tokens-mean", str(cell.prompt_tokens)),
        *("--output-tokens-mean", str(cell.output_tokens), "--random-seed", str(cell.seed)),
        *("--request-count", str(cell.requests), "--num-dataset-entries", str(cell.requests)),
        *("--artifact-dir", str(run.folder)),
    ]
    for name, value in [("ignore_eos", "true"), *cell.sampling.items()]:
        arguments += ["--extra-inputs", f"{name}:{value}"]
    return arguments


def _find(program: str, given: Mapping[str, str]) -> str | None:
    return given.get(program) or shutil.which(program)


def _is_ours(program: str) -> bool:
    """Return whether a program is the one of the same name that this project installs."""
    try:
        return "slipstream" in Path(program).read_text(errors="replace")[:2000]
    except OSError:
        return False


def installed_clients(given: Mapping[str, str]) -> list[ThirdParty]:
    """Return the load generators found here, best first. `given`: program → path."""
    found = []
    if vllm := _find("vllm", given):
        found.append(ThirdParty("vllm bench", vllm, _vllm_arguments, _read_vllm))
    if aiperf := _find("aiperf", given):
        found.append(
            ThirdParty(
                "aiperf",
                aiperf,
                _aiperf_arguments,
                lambda run: _read_genai(run, "profile_export_aiperf.json"),
                is_offline=False,
            )
        )
    genai = _find("genai-perf", given)
    analyzer = shutil.which("perf_analyzer")
    if genai and analyzer and not _is_ours(genai) and not _is_ours(analyzer):
        found.append(
            ThirdParty(
                "genai-perf",
                genai,
                _genai_arguments,
                lambda run: _read_genai(run, "profile_export_genai_perf.json"),
            )
        )
    return found


def can_measure(cell: Cell) -> bool:
    """Return whether the clients of others can generate this load."""
    return cell.api == COMPLETIONS
