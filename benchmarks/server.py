"""Measures the cost of the server itself with trivial models, beside the real Triton if given.

    python benchmarks/server.py [--triton BINARY] [--before CHECKOUT] [--seconds 1] [--rounds 3]
                                [--step-ms 2.5] [--only streams]

Rates are medians over rounds; each round visits every server in turn. On a busy machine the ratios
are more stable than the rates, and the CPU time per request is the most stable figure. The client
is one more process on the same machine.

Tokens that arrive while the server is busy go out as one event. The engine of `own` takes no time,
so its streams have many tokens per event. The engine of `paced` takes --step-ms per step, so that
its server keeps up and each token is one event.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvloop
from grpc_load import GrpcLoad, grpc_infer_load, grpc_rate, grpc_stream_load
from server_load import (
    Load,
    Rate,
    chat_load,
    completions_load,
    generate_load,
    http_rate,
    infer_load,
    stream_load,
)
from server_peers import Peer, start_ours, start_triton

TEXT = "What is machine learning?"
TOKENS = 64
REQUESTS = (1, 8, 32)
STREAMS = (1, 64, 256, 1024)
PACED_STREAMS = (64, 256)
PACED = "slipstream, paced"
BEFORE = "before"


@dataclass(frozen=True)
class Case:
    title: str
    unit: str
    run: Callable[[Peer, float], Awaitable[Rate]]
    paced: bool = False  # only for the servers with the paced engine, and for Triton
    own: bool = False  # only for the built-in models


def cases() -> list[Case]:
    found = []
    message = grpc_infer_load(TEXT.encode())
    for concurrency in REQUESTS:
        for title, load in (
            ("HTTP generate", generate_load(TEXT)),
            ("HTTP infer", infer_load(TEXT)),
        ):
            found.append(Case(f"{title} × {concurrency}", "requests/s", _http(load, concurrency)))

        found.append(Case(f"gRPC infer × {concurrency}", "requests/s", _grpc(message, concurrency)))
    found.sort(key=lambda case: case.title.split(" × ")[0])
    for paced, counts in ((False, STREAMS), (True, PACED_STREAMS)):
        for streams in counts:
            for title, load in (
                ("generate_stream", stream_load(TOKENS)),
                ("completions", completions_load(TOKENS)),
                ("chat", chat_load(TOKENS)),
            ):
                name = f"{title} × {streams}{', paced' * paced}"
                own = title != "generate_stream"
                found.append(Case(name, "tokens/s", _http(load, streams), paced, own))
            name = f"gRPC stream × {streams}{', paced' * paced}"
            run = _grpc(grpc_stream_load(TOKENS), streams)
            found.append(Case(name, "tokens/s", run, paced, own=True))
    return found


def _http(load: Load, concurrency: int) -> Callable[[Peer, float], Awaitable[Rate]]:
    return lambda peer, seconds: http_rate(peer.http_port, load, concurrency, seconds)


def _grpc(load: GrpcLoad, concurrency: int) -> Callable[[Peer, float], Awaitable[Rate]]:
    return lambda peer, seconds: grpc_rate(peer.grpc_port, load, concurrency, seconds)


def check_stream(peer: Peer) -> float:
    """Check that the server streams the expected words. Return the tokens per event."""
    load = stream_load(TOKENS)
    request = urllib.request.Request(f"http://127.0.0.1:{peer.http_port}{load.path}", load.body)
    with urllib.request.urlopen(request, timeout=30) as answer:
        events = [
            json.loads(line[6:])
            for line in answer.read().split(b"\n")
            if line.startswith(b"data: ")
        ]
    words = "".join(event["text_output"] for event in events).split()
    if words != [str(6 + number) for number in range(TOKENS)]:
        raise RuntimeError(
            f"{peer.name} streams other words: {words[:10]} … ({len(words)} of {TOKENS})"
        )
    return len(words) / len(events)


@dataclass(frozen=True)
class Sample:
    units: float
    events: float
    microseconds: float  # CPU time of the server and its child processes per unit
    microseconds_per_event: float


def sample(case: Case, peer: Peer, seconds: float) -> Sample:
    before = peer.cpu_seconds()
    began = time.monotonic()
    rate = uvloop.run(case.run(peer, seconds))
    used = peer.cpu_seconds() - before
    took = time.monotonic() - began
    microseconds = 1e6 * used / took
    return Sample(
        rate.units,
        rate.events,
        microseconds / rate.units,
        microseconds / max(1.0, rate.events),
    )


def takes_part(case: Case, peer: Peer) -> bool:
    if peer.name == "triton" or not peer.built_in:
        return not case.own and (peer.name == "triton" or not case.paced)
    return peer.paced == case.paced


def measure(
    peers: list[Peer], seconds: float, rounds: int, only: str
) -> dict[str, dict[str, float]]:
    rates: dict[str, dict[str, float]] = {}
    for case in cases():
        if only not in case.title:
            continue
        chosen = [peer for peer in peers if takes_part(case, peer)]
        samples: dict[str, list[Sample]] = {peer.name: [] for peer in chosen}
        for _ in range(rounds):
            for peer in chosen:
                samples[peer.name].append(sample(case, peer, seconds))
        rows = {case.unit: "units"}
        if case.unit == "tokens/s":
            # tokens that arrive while the server is busy go out as one event
            rows["events/s"] = "events"
        rows[f"CPU µs per {case.unit.removesuffix('s/s')}"] = "microseconds"
        if case.unit == "tokens/s":
            rows["CPU µs per event"] = "microseconds_per_event"
        for unit, field in rows.items():
            found = {
                name: median(getattr(one, field) for one in some) for name, some in samples.items()
            }
            rates[f"{case.title}, {unit}"] = found
            print(_line(f"{case.title}, {unit}", found, peers), flush=True)
    return rates


def _line(title: str, rates: dict[str, float], peers: list[Peer]) -> str:
    base = rates.get("triton")
    ours = [peer for peer in peers if peer.name != "triton"] if base else []
    cells = [_cell(rates[peer.name]) if peer.name in rates else "" for peer in peers]
    cells += [
        f"{rates[peer.name] / base:.2f}" if base and peer.name in rates else "" for peer in ours
    ]
    return f"| {title:<46} | " + " | ".join(f"{cell:>12}" for cell in cells) + " |"


def _cell(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def header(peers: list[Peer]) -> str:
    names = [peer.name for peer in peers]
    if "triton" in names:
        names += [
            f"{name.removeprefix('slipstream, ')}/triton" for name in names if name != "triton"
        ]
    first = f"| {'':<46} | " + " | ".join(f"{name:>12}" for name in names) + " |"
    return first + "\n|" + "---|" * (len(names) + 1)


def start_peers(peers: list[Peer], options: argparse.Namespace, folder: Path) -> None:
    """Start the servers and add each to `peers`, so that they can be stopped."""

    def new_folder(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    peers.append(start_ours("own", new_folder("own")))
    peers.append(start_ours("own", new_folder("paced"), options.step_ms, PACED))
    if options.frontends > 1:
        several = {"frontends": options.frontends}
        name = f"{options.frontends} front ends"
        peers.append(start_ours("own", new_folder("several"), name=name, **several))
        folder_paced = new_folder("several-paced")
        name = f"{name}, paced"
        peers.append(start_ours("own", folder_paced, options.step_ms, name, **several))
    if options.before:
        name = BEFORE
        peers.append(start_ours("own", new_folder("before"), 0.0, name, options.before))
        name = f"{BEFORE}, paced"
        peers.append(
            start_ours("own", new_folder("before-paced"), options.step_ms, name, options.before)
        )
    if not options.before or options.triton:
        peers.append(start_ours("model.py", new_folder("python")))
    if options.triton:
        peers.append(start_triton(options.triton, new_folder("triton")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--triton",
        type=Path,
        help="Path of the real tritonserver, for example from nvidia-pytriton",
    )
    parser.add_argument(
        "--before", type=Path, help="Checkout of another version of Slipstream to compare with"
    )
    parser.add_argument(
        "--only", default="", help="Measure only the cases whose title has this text in it"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="Seconds of each measurement (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="Number of rounds (default: 3)")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=2.5,
        help="Milliseconds of a step of the paced engine (default: 2.5)",
    )
    parser.add_argument(
        "--frontends",
        type=int,
        default=1,
        help="Also measure a server with this many processes (default: 1, no other server)",
    )
    parser.add_argument("--json", type=Path, help="Write the rates to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        peers: list[Peer] = []
        try:
            start_peers(peers, options, Path(temporary))
            for peer in peers:
                peer.wait_ready()
                tokens = check_stream(peer)
                print(f"{peer.name}: {tokens:.1f} tokens per event when one stream runs alone")
            print(f"{os.cpu_count()} cores, {TOKENS} tokens a stream\n\n{header(peers)}")
            rates = measure(peers, options.seconds, options.rounds, options.only)
        finally:
            for peer in peers:
                peer.stop()
    if options.json:
        options.json.write_text(json.dumps(rates, indent=2))


if __name__ == "__main__":
    main()
