"""Speed through the server, beside the engine alone and beside other servers, under load.

    python benchmarks/online.py                          # SmolLM2-135M, concurrency 1 to 64
    python benchmarks/online.py --small                  # a tiny model, in under a minute
    python benchmarks/online.py --model llama3-8b-49k --tokenizer FOLDER --concurrency 1,64,256

Starts our server and, where installed, `vllm serve` and llama.cpp's server, on the same weights and
one after the other. Prints throughput, time to first token and time between tokens. Then runs the
engine without the server, with the same prompts and as many requests in flight. Greedy tokens over
HTTP and gRPC are compared with the offline engine's.

Our client measures at the socket, in several processes. Clients of others (`vllm bench serve`,
aiperf, genai-perf) run beside it at low concurrency where they are installed. --out FOLDER writes
the figures as JSON and a page of plots.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs without an installed package

from serving import clients, report, servers, shapes
from serving.cells import APIS, COMPLETIONS, Cell, Figures
from serving.measure import agreement, grpc_tokens, http_tokens, measure
from serving.offline import run_offline
from serving.published import published

from slipstream.version import VERSION

DEFAULT_MODEL = "smollm2-135m"
_CHECK_TOKENS = 32
_CHECK_SEED = 10**6
_WARM_UP_SEED = 2 * 10**6
_RATE_SECONDS = 10.0  # duration of a load with a rate


# defaults with --small
_SMALL = {
    "model": "tiny",
    "device": "cpu",
    "concurrency": [1, 16],
    "sampled": [16],
    "rates": [20],
    "apis": ",".join(APIS),
    "prompt": 16,
    "output": 8,
    "per_stream": 2,
    "processes": 2,
}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_model_options(parser)
    _add_load_options(parser)
    parser.add_argument(
        "--servers",
        default="all",
        help=f"servers of {', '.join(servers.STARTS)}, separated by commas "
        "(default: all that are installed)",
    )
    parser.add_argument(
        "--clients",
        default="all",
        help="clients besides ours: vllm, aiperf, genai-perf or none (default: all installed)",
    )
    parser.add_argument(
        "--client-path",
        action="append",
        default=[],
        metavar="NAME=PROGRAM",
        help="path of the program vllm, aiperf or genai-perf",
    )
    parser.add_argument(
        "--client-limit",
        type=int,
        default=64,
        help="highest concurrency for clients of others (default: 64)",
    )
    parser.add_argument(
        "--processes", type=int, default=8, help="processes of our client (default: 8)"
    )
    parser.add_argument(
        "--no-offline", action="store_true", help="do not run the engine without the server"
    )
    parser.add_argument(
        "--check", type=int, default=8, help="prompts whose tokens are compared (default: 8)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the CPU time of each kind of process"
    )
    parser.add_argument("--out", type=Path, help="folder for online.json and online.html")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps the model for the next run (default: none)"
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and short loads, for a quick check"
    )
    options, _ = parser.parse_known_args(arguments)
    if options.small:
        parser.set_defaults(**_SMALL)
    return parser.parse_args(arguments)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        choices=[DEFAULT_MODEL, *shapes.SHAPES],
        default=DEFAULT_MODEL,
        help=f"the packaged model, or random weights of a shape (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of a tokenizer for random weights, such as SmolLM2's"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device (default: a GPU if any)")
    parser.add_argument(
        "--rows", type=int, default=0, help="running requests (default: the server's own)"
    )
    parser.add_argument(
        "--server-args", default="", help="further arguments of `slipstream start`, in one text"
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="interpreter that has vllm or llama_cpp.server installed",
    )


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency",
        type=numbers,
        default=[1, 16, 64],
        help="requests in flight, separated by commas (default: 1,16,64)",
    )
    parser.add_argument(
        "--sampled",
        type=numbers,
        default=[],
        help="concurrencies to run with temperature 0.7 and top_p 0.9, too (default: none)",
    )
    parser.add_argument(
        "--rates",
        type=numbers,
        default=[],
        help="requests a second that arrive at random times (default: none)",
    )
    parser.add_argument(
        "--apis",
        default=COMPLETIONS,
        help=f"APIs of {', '.join(APIS)}, separated by commas (default: {COMPLETIONS})",
    )
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens (default: 512)")
    parser.add_argument("--output", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument(
        "--per-stream",
        type=int,
        help="requests per stream (default: 4, above 64 streams 3, above 256 streams 2)",
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that a load may take (default: 300)"
    )


def request_count(streams: int, per_stream: int | None) -> int:
    """Return the number of requests of a load, at least 8."""
    default = 4 if streams <= 64 else 3
    if streams > 256:
        default = 2
    return max(8, streams * (per_stream or default))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the loads: greedy by API and concurrency, then sampled, then by rate."""
    lengths = (options.prompt, options.output)
    each = options.per_stream
    found = []
    for api in options.apis.split(","):
        for streams in options.concurrency:
            found.append(Cell(streams, request_count(streams, each), *lengths, api=api))
    for streams in options.sampled:
        found.append(Cell(streams, request_count(streams, each), *lengths, sampled=True))
    for rate in options.rates:
        seconds = 1.0 if options.small else _RATE_SECONDS
        found.append(Cell(0, max(8, round(rate * seconds)), *lengths, rate=float(rate)))
    return [replace(cell, seed=number) for number, cell in enumerate(found, 1)]


def pairs(texts: Sequence[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


@dataclass
class Benchmark:
    """One run: its model, its loads and its results so far."""

    options: argparse.Namespace
    server_options: servers.ServerOptions
    model: shapes.Model
    folder: Path
    make_prompts: Callable[[int, int, int], shapes.Prompts]
    results: list[Figures] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)  # protocol → greedy tokens
    seconds_to_ready: dict[str, float] = field(default_factory=dict)
    repository: Path | None = None  # of our server

    @property
    def cells(self) -> list[Cell]:
        return cells_of(self.options)

    def prompts(self, cell: Cell) -> shapes.Prompts:
        return self.make_prompts(cell.requests, cell.prompt_tokens, cell.seed)

    def add(self, figures: Figures) -> None:
        self.results.append(figures)
        print(report.row(figures, report.find_ours(figures, self.results)), flush=True)
        line = report.cpu_row(figures) if self.options.profile else ""
        if line:
            print(line, flush=True)

    def run_server(self, name: str, third_party: Sequence[clients.ThirdParty]) -> None:
        """Run every load on a server. A load that fails is reported, and the next one runs."""
        folder = self.folder / name
        began = time.monotonic()
        server = servers.start(name, self.model, folder, self.server_options)
        try:
            self.seconds_to_ready[name] = time.monotonic() - began
            if name == servers.OURS:
                self.repository = folder / "repository"
                self._take_tokens(server)
            self._warm_up(server)
            for cell in self.cells:
                if cell.api in server.apis:
                    self._run_cell(server, cell, third_party)
        finally:
            server.stop()

    def _warm_up(self, server: servers.RunningServer) -> None:
        most = min(max([*self.options.concurrency, *self.options.sampled, 8]), 256)
        cell = Cell(most, most, self.options.prompt, 4, seed=_WARM_UP_SEED)
        figures = measure(server, cell, self.prompts(cell), self.options.processes, 120.0)
        if figures.errors:
            print(f"warm-up of {server.name}: {figures.errors[0]}", flush=True)

    def _run_cell(
        self,
        server: servers.RunningServer,
        cell: Cell,
        third_party: Sequence[clients.ThirdParty],
    ) -> None:
        options = self.options
        try:
            prompts = self.prompts(cell)
            self.add(measure(server, cell, prompts, options.processes, options.limit))
        except Exception as error:
            print(f"{server.name}, {cell.load}: {type(error).__name__}: {error}", flush=True)
        if not clients.can_measure(cell) or cell.concurrency > options.client_limit:
            return
        for client in third_party:
            folder = self.folder / f"{server.name}-{client.name}-{cell.seed}".replace(" ", "-")
            run = clients.Run(server.target, cell, self.model.engine, folder)
            try:
                self.add(client.measure(server.name, run))
            except Exception as error:
                print(f"{server.name}, {cell.load}: {type(error).__name__}: {error}", flush=True)

    def _take_tokens(self, server: servers.RunningServer) -> None:
        if self.options.check:
            prompts = self._check_prompts()
            self.tokens["HTTP"] = http_tokens(server, prompts, _CHECK_TOKENS)
            self.tokens["gRPC"] = grpc_tokens(server, prompts, _CHECK_TOKENS)

    def _check_prompts(self) -> shapes.Prompts:
        return self.make_prompts(self.options.check, self.options.prompt, _CHECK_SEED)

    def run_offline(self) -> None:
        """Run the loads of our server on the engine alone, and compare greedy tokens."""
        assert self.repository is not None
        cells = [cell for cell in self.cells if cell.api == COMPLETIONS and not cell.rate]
        loads = [(cell, self.prompts(cell).tokens) for cell in cells]
        if self.tokens:
            count = self.options.check
            check = Cell(count, count, self.options.prompt, _CHECK_TOKENS, seed=_CHECK_SEED)
            loads.insert(0, (check, self._check_prompts().tokens))
        found = run_offline(
            self.model, self.repository, self.server_options, loads, self.folder / "offline"
        )
        for (cell, _), answer in zip(loads, found, strict=True):
            if cell.seed == _CHECK_SEED:
                self._compare(answer["tokens"])
                continue
            count = sum(map(len, answer["tokens"]))
            seconds = answer["seconds"]
            self.add(Figures(report.OFFLINE, "", cell, count / seconds, seconds=seconds))

    def _compare(self, reference: list[list[int]]) -> None:
        for protocol, answers in self.tokens.items():
            self.checks[protocol] = agreement(answers, reference)

    def add_published(self) -> None:
        for cell in self.cells:
            figures = published(self.model.name, cell)
            if figures is not None:
                self.add(figures)

    def settings(self) -> dict[str, object]:
        given = {name: value for name, value in vars(self.options).items() if value}
        return {
            "version": VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(self.server_options.device),
            "model": f"{self.model.name}, {self.model.dtype}",
            "prompt / output tokens": f"{self.options.prompt} / {self.options.output}",
            "seconds to ready": self.seconds_to_ready,
            "tokens as offline": self.checks,
            "options": {name: str(value) for name, value in given.items()},
        }

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        document = {"settings": self.settings(), "results": [one.to_json() for one in self.results]}
        (folder / "online.json").write_text(json.dumps(document, indent=1, default=str))
        title = f"Online: {self.model.name}"
        (folder / "online.html").write_text(report.page(title, self.settings(), self.results))


def machine(device: str) -> str:
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    if device == "cuda":
        import torch

        return f"{torch.cuda.get_device_name()}, {cores}"
    return cores


def find_device(given: str | None) -> str:
    if given:
        return given
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen_servers(
    options: argparse.Namespace, server_options: servers.ServerOptions
) -> Iterator[str]:
    yield servers.OURS
    wanted = list(servers.PEERS) if options.servers == "all" else options.servers.split(",")
    for name in wanted:
        if name == servers.OURS:
            continue
        if name not in servers.STARTS:
            raise SystemExit(f"unknown server: {name}; known: {', '.join(servers.STARTS)}")
        if servers.is_installed(name, server_options):
            yield name


def prepare_model(
    options: argparse.Namespace, names: Sequence[str], folder: Path, device: str
) -> shapes.Model:
    if options.model == DEFAULT_MODEL:
        return shapes.default_model()
    if options.tokenizer is None and options.model != "tiny":
        raise SystemExit(f"--model {options.model} needs --tokenizer FOLDER")
    write = shapes.write_for_peers if servers.VLLM in names else shapes.write_engine
    place = (options.work or folder) / options.model
    return write(options.model, place, options.tokenizer, device)


def chosen_clients(options: argparse.Namespace) -> list[clients.ThirdParty]:
    if options.clients == "none":
        return []
    found = clients.installed_clients(pairs(options.client_path))
    if options.clients == "all":
        return found
    wanted = options.clients.split(",")
    return [one for one in found if one.name.split()[0] in wanted]


def run(options: argparse.Namespace, folder: Path) -> Benchmark:
    device = find_device(options.device)
    peer_python = pairs(options.peer_python)
    server_options = servers.ServerOptions(
        device, options.rows, shlex.split(options.server_args), peer_python
    )
    names = list(chosen_servers(options, server_options))
    began = time.monotonic()
    model = prepare_model(options, names, folder, device)
    print(f"{model.name}: model written in {time.monotonic() - began:.1f} s", flush=True)
    benchmark = Benchmark(options, server_options, model, folder, shapes.prompt_maker(model))
    third_party = chosen_clients(options)
    listed = ", ".join(["own", *(one.name for one in third_party)])
    print(
        f"Slipstream {VERSION}, {machine(device)}; prompts of {options.prompt}, answers of "
        f"{options.output} tokens; clients: {listed}\n\n{report.header()}",
        flush=True,
    )
    for name in names:
        if servers.can_serve(name, model):
            try:
                benchmark.run_server(name, third_party)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
    benchmark.add_published()
    if not options.no_offline and benchmark.repository is not None:
        benchmark.run_offline()
    return benchmark


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    # a time limit must not leave servers behind
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="online-") as temporary:
        benchmark = run(options, Path(temporary))
    print("\n" + "\n".join(report.notes(benchmark.results)))
    for name, seconds in benchmark.seconds_to_ready.items():
        print(f"{name}: start to ready in {seconds:.1f} s")
    for protocol, text in benchmark.checks.items():
        print(f"greedy tokens over {protocol}, compared with the offline engine: {text}")
    if options.out:
        benchmark.write(options.out)
        print(f"written: {options.out / 'online.json'}, {options.out / 'online.html'}")
    failed = [one for one in benchmark.results if one.errors]
    return 1 if failed or not benchmark.results else 0


if __name__ == "__main__":
    sys.exit(main())
