"""Measures the cost of the server itself with trivial models, beside the real Triton if given.

    python benchmarks/server.py [--triton BINARY] [--seconds 1] [--rounds 3] [--step-ms 2.5]

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
from grpc_load import grpc_body, grpc_rate
from server_load import Load, Rate, generate_load, http_rate, infer_load, stream_load
from server_peers import Peer, start_ours, start_triton

TEXT = "What is machine learning?"
TOKENS = 64
REQUESTS = (1, 8, 32)
STREAMS = (1, 8, 64)
PACED = "slipstream, paced"


@dataclass(frozen=True)
class Case:
    title: str
    unit: str
    run: Callable[[Peer, float], Awaitable[Rate]]
    paced: bool = False  # only for the server with the paced engine, and for Triton


def cases() -> list[Case]:
    found = []
    message = grpc_body(TEXT.encode())
    for concurrency in REQUESTS:
        for title, load in (
            ("HTTP generate", generate_load(TEXT)),
            ("HTTP infer", infer_load(TEXT)),
        ):
            found.append(Case(f"{title} × {concurrency}", "requests/s", _http(load, concurrency)))

        found.append(Case(f"gRPC infer × {concurrency}", "requests/s", _grpc(message, concurrency)))
    found.sort(key=lambda case: case.title.split(" × ")[0])
    for streams in STREAMS:
        found.append(
            Case(f"generate_stream × {streams}", "tokens/s", _http(stream_load(TOKENS), streams))
        )
    one_each = f"generate_stream × {STREAMS[-1]}, paced"
    return [*found, Case(one_each, "tokens/s", _http(stream_load(TOKENS), STREAMS[-1]), paced=True)]


def _http(load: Load, concurrency: int) -> Callable[[Peer, float], Awaitable[Rate]]:
    return lambda peer, seconds: http_rate(peer.http_port, load, concurrency, seconds)


def _grpc(message: bytes, concurrency: int) -> Callable[[Peer, float], Awaitable[Rate]]:
    async def run(peer: Peer, seconds: float) -> Rate:
        return Rate(await grpc_rate(peer.grpc_port, message, concurrency, seconds))

    return run


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


def sample(case: Case, peer: Peer, seconds: float) -> Sample:
    before = peer.cpu_seconds()
    began = time.monotonic()
    rate = uvloop.run(case.run(peer, seconds))
    used = peer.cpu_seconds() - before
    took = time.monotonic() - began
    return Sample(rate.units, rate.events, 1e6 * used / (rate.units * took))


def measure(peers: list[Peer], seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    rates: dict[str, dict[str, float]] = {}
    for case in cases():
        chosen = [
            peer for peer in peers if peer.name == "triton" or (peer.name == PACED) == case.paced
        ]
        samples: dict[str, list[Sample]] = {peer.name: [] for peer in chosen}
        for _ in range(rounds):
            for peer in chosen:
                samples[peer.name].append(sample(case, peer, seconds))
        rows = {case.unit: "units"}
        if case.unit == "tokens/s":
            # tokens that arrive while the server is busy go out as one event
            rows["events/s"] = "events"
        rows[f"CPU µs per {case.unit.removesuffix('s/s')}"] = "microseconds"
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
    cells = [f"{rates[peer.name]:,.0f}" if peer.name in rates else "" for peer in peers]
    cells += [
        f"{rates[peer.name] / base:.2f}" if base and peer.name in rates else "" for peer in ours
    ]
    return f"| {title:<46} | " + " | ".join(f"{cell:>12}" for cell in cells) + " |"


def header(peers: list[Peer]) -> str:
    names = [peer.name for peer in peers]
    if "triton" in names:
        names += [
            f"{name.removeprefix('slipstream, ')}/triton" for name in names if name != "triton"
        ]
    first = f"| {'':<46} | " + " | ".join(f"{name:>12}" for name in names) + " |"
    return first + "\n|" + "---|" * (len(names) + 1)


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
        "--seconds", type=float, default=1.0, help="Seconds of each measurement (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="Number of rounds (default: 3)")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=2.5,
        help="Milliseconds of a step of the paced engine (default: 2.5)",
    )
    parser.add_argument("--json", type=Path, help="Write the rates to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("own", "paced", "python", "triton")]
        for folder in folders:
            folder.mkdir()
        peers: list[Peer] = []
        try:
            peers.append(start_ours("own", folders[0]))
            peers.append(start_ours("own", folders[1], options.step_ms, PACED))
            peers.append(start_ours("model.py", folders[2]))
            if options.triton:
                peers.append(start_triton(options.triton, folders[3]))
            for peer in peers:
                peer.wait_ready()
                tokens = check_stream(peer)
                print(f"{peer.name}: {tokens:.1f} tokens per event when one stream runs alone")
            print(f"{os.cpu_count()} cores, {TOKENS} tokens a stream\n\n{header(peers)}")
            rates = measure(peers, options.seconds, options.rounds)
        finally:
            for peer in peers:
                peer.stop()
    if options.json:
        options.json.write_text(json.dumps(rates, indent=2))


if __name__ == "__main__":
    main()
