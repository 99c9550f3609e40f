"""A model on this CPU: Slipstream, llama.cpp and vLLM with the same weights.

    python benchmarks/cpu.py --llama-python ~/llama/bin/python --vllm-python ~/vllm/bin/python
    python benchmarks/cpu.py --shape llama-1b --peers llama.cpp   # random weights

The goals are ratios to llama.cpp. `--peers llama.cpp,torch` adds Slipstream's own torch path, which
runs where there is no compiled code. In the case "beside a busy program" another process keeps one
core busy. Each such run follows a quiet one, and the share that it keeps is shown beside it.

Every contender runs in its own process. Each round runs all of them in turn, and a figure is the
median of its rounds, so that other load on the machine affects all of them. Sampling is greedy,
end tokens are ignored, prefixes are not reused, and all contenders get the same token ids.

The limit of a case follows from the bytes that it must read and the operations that it must
compute, and from the fastest memory read and bf16 GEMM measured in the run. The limit of the start
is one read of the weights, and that of the memory is the size of the weights.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

# makes the benchmark run from a checkout that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contender import Contender, ContenderFailed, Running, start
from cpu_server import measure_server
from limits import Machine, Work
from models import Models, prepare_models, prepare_random_models
from random_gguf import SHAPES
from table import OURS, Row, medians, render

from slipstream.engine.memory.cores import usable_cores
from slipstream.engine_worker import cpu_probe
from slipstream.server.engine_link.child import child_environment
from slipstream.weights.home import slipstream_home

LLAMA = "llama.cpp"
VLLM = "vllm"
TORCH = "torch"
PEERS = (LLAMA, VLLM, TORCH)
BF16 = "bf16"
Q4 = "4-bit"
# Bytes per weight. A block of 32 weights has one or two 16-bit numbers.
WEIGHT_BYTES = {BF16: 2.0, Q4: 0.5 + 4 / 32}
DEFAULT_SHAPE = "smollm2-135m"
QUESTION = "The capital of France is"
QUESTION_TOKENS = (103, 227, 145, 391, 218)  # a prompt for the start of every model
EAGER_NOTE = "vllm could not compile here and ran with enforce_eager"
START_GOALS = {"cold_start": 0.5, "server_start": 1.5}  # seconds to the first token
VLLM_GOAL = 1.5  # × vLLM, where more is better
IDLE_SECONDS = 5.0
SLOW_START_SECONDS = 30.0  # start time above which a contender is started only once
LOGS = slipstream_home() / "benchmarks"

Samples = dict[tuple[str, str, str], list[float]]  # (case, group, contender) → figure per round


@dataclass(frozen=True)
class Load:
    """Requests that arrive at the same time, and the cases that they measure."""

    rows: int
    prompt: int
    output: int
    cases: tuple[str, ...]
    busy: bool = False  # once on a quiet machine, then while another process keeps a core busy
    sampled: bool = False  # temperature 0.7 and top-p 0.9, which the peers' workers do not have


@dataclass(frozen=True)
class Case:
    title: str
    unit: str
    higher_is_better: bool
    limit: Callable[[Work, Machine, int], float]  # (work, machine, output tokens) → limit
    goals: tuple[float | None, float | None] = (None, None)  # × llama.cpp: bf16, 4-bit


LOADS = (
    Load(1, 512, 128, ("decode", "first_token", "memory")),
    Load(8, 128, 128, ("concurrent_8", "memory")),
    Load(32, 128, 128, ("concurrent_32", "memory")),
    Load(1, 128, 128, ("busy", "kept"), busy=True),
    Load(1, 128, 128, ("sampled_1",), sampled=True),
    Load(8, 128, 128, ("sampled_8",), sampled=True),
    Load(32, 128, 128, ("sampled_32",), sampled=True),
)
CASES = {
    "decode": Case(
        "1 × 512/{output} decode",
        "tok/s",
        True,
        lambda work, machine, out: work.decode_rate(machine, 512, out),
        (1.3, 2.3),
    ),
    "first_token": Case(
        "1 × 512 first token",
        "ms",
        False,
        lambda work, machine, _: work.prefill_seconds(machine, 1, 512) * 1e3,
        (0.65, 0.3),
    ),
    "concurrent_8": Case(
        "8 × 128/{output} output",
        "tok/s",
        True,
        lambda work, machine, out: work.batch_rate(machine, 8, 128, out),
        (2.0, 3.3),
    ),
    "concurrent_32": Case(
        "32 × 128/{output} output",
        "tok/s",
        True,
        lambda work, machine, out: work.batch_rate(machine, 32, 128, out),
        (1.8, 3.5),
    ),
    "busy": Case(
        "1 × 128/{output} decode beside a busy program",
        "tok/s",
        True,
        lambda work, machine, out: work.decode_rate(machine, 128, out),
        (1.0, 1.0),
    ),
    "kept": Case(
        "1 × 128/{output} decode kept beside a busy program",
        "%",
        True,
        lambda *_: fair_share() * 100,
    ),
    **{
        f"sampled_{rows}": Case(
            f"{rows} × 128/{{output}} sampled output",
            "tok/s",
            True,
            lambda work, machine, out, rows=rows: work.batch_rate(machine, rows, 128, out),
        )
        for rows in (1, 8, 32)
    },
    "server_start": Case(
        "`slipstream start` to first token over HTTP",
        "s",
        False,
        lambda work, machine, _: work.model_bytes / machine.bandwidth,
    ),
    "idle": Case("CPU time of an idle server", "% of a core", False, lambda *_: 0.0),
    "cold_start": Case(
        "process start to first token",
        "s",
        False,
        lambda work, machine, _: work.model_bytes / machine.bandwidth,
    ),
    "memory": Case(
        "peak memory", "MB", False, lambda work, machine, _: work.model_bytes / 1e6, (1.1, 1.1)
    ),
}


def main() -> None:
    arguments = parse_arguments()
    cases = [arguments.only] if arguments.only else list(CASES)
    rounds, output = (1, 32) if arguments.quick else (3, 128)
    warn_when_busy()
    shape = arguments.shape
    if shape == DEFAULT_SHAPE:
        models = prepare_models()
    else:
        models = prepare_random_models(shape, hugging_face=VLLM in arguments.peers)
    contenders = find_contenders(models, arguments)
    samples: Samples = defaultdict(list)
    running: dict[tuple[str, str], Running] = {}
    try:
        start_all(contenders, models, rounds if "cold_start" in cases else 1, running, samples)
        if shape == DEFAULT_SHAPE:
            compare_answers(running.values(), models)
        machine = run_rounds(
            running.values(), cases, rounds, output, models.spec.vocab_size, samples
        )
        for key, one in running.items():
            samples["memory", *key].append(one.peak_bytes() / 1e6)
        if {"server_start", "idle"} & set(cases):
            measure_servers(models, rounds, samples)
    finally:
        for one in running.values():
            one.close()
    print_table(
        models, machine, cases, output, samples, [one.contender for one in running.values()]
    )
    print_start_goals(samples)
    print_vllm_goals(samples)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--peers",
        default=f"{LLAMA},{VLLM}",
        help="peers to compare with, separated by commas; '' for none (default: %(default)s)",
    )
    parser.add_argument("--only", choices=CASES, help="run one case")
    parser.add_argument(
        "--shape",
        choices=(DEFAULT_SHAPE, *SHAPES),
        default=DEFAULT_SHAPE,
        help="model; all but the default have random weights (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run one round of 32 tokens, as a smoke test"
    )
    parser.add_argument(
        "--llama-python", default=sys.executable, help="Python interpreter with llama_cpp"
    )
    parser.add_argument(
        "--vllm-python", default=sys.executable, help="Python interpreter with vllm"
    )
    arguments = parser.parse_args()
    arguments.peers = [peer for peer in arguments.peers.split(",") if peer]
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    return arguments


def find_contenders(models: Models, arguments: argparse.Namespace) -> list[Contender]:
    def engine(group: str, folder: Path, name: str = OURS) -> Contender:
        options = {"model": str(folder), "code": "off" if name == TORCH else "auto"}
        return Contender(
            name, group, sys.executable, "worker_slipstream.py", options, child_environment()
        )

    def llama(group: str, file: Path) -> Contender:
        return Contender(
            LLAMA, group, arguments.llama_python, "worker_llama.py", {"model": str(file)}
        )

    found = [engine(BF16, models.engine_bf16), engine(Q4, models.engine_q4)]
    if TORCH in arguments.peers:
        found += [engine(BF16, models.engine_bf16, TORCH), engine(Q4, models.engine_q4, TORCH)]
    if LLAMA in arguments.peers and has_module(arguments.llama_python, "llama_cpp"):
        found += [llama(BF16, models.gguf_bf16), llama(Q4, models.gguf_q4)]
    has_folder = models.hugging_face is not None
    if VLLM in arguments.peers and has_folder and has_module(arguments.vllm_python, "vllm"):
        # a peer may crash on instructions that the CPU reports but does not support
        limit = cpu_probe.choose().isa
        environment = {cpu_probe.ISA_VARIABLE: limit} if limit else {}
        options = {"model": str(models.hugging_face)}
        found.append(
            Contender(VLLM, BF16, arguments.vllm_python, "worker_vllm.py", options, environment)
        )
    return found


def has_module(python: str, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    found = subprocess.run([python, "-c", code], check=False).returncode == 0
    if not found:
        print(f"left out: {python} has no module {module}")
    return found


def start_all(
    contenders: list[Contender],
    models: Models,
    times: int,
    running: dict[tuple[str, str], Running],
    samples: Samples,
) -> None:
    """Start each contender `times` times in turn and leave the last of each running."""
    prompt = list(QUESTION_TOKENS)
    waiting = list(contenders)
    for _ in range(times):
        started: list[Contender] = []
        for contender in waiting:
            if contender.key in running:
                running.pop(contender.key).close()
            if (one := start_one(contender, prompt)) is None:
                continue
            running[contender.key], seconds = one
            samples["cold_start", *contender.key].append(seconds)
            progress(f"{contender.name}, {contender.group}: first token after {seconds:.1f} s")
            if seconds < SLOW_START_SECONDS:
                started.append(running[contender.key].contender)
        waiting = started


def start_one(contender: Contender, prompt: list[int]) -> tuple[Running, float] | None:
    """Return the contender and the time of its first token, or None if it cannot run.

    vLLM is started without its compiler if it cannot compile.
    """
    attempts = [contender]
    if contender.name == VLLM:
        eager = {**contender.options, "eager": True}
        attempts.append(replace(contender, options=eager, note=EAGER_NOTE))
    for attempt in attempts:
        try:
            return start(attempt, LOGS / f"{contender.name}-{contender.group}.log", prompt)
        except ContenderFailed as failure:
            print(f"cannot run {failure}", flush=True)
    return None


def measure_servers(models: Models, rounds: int, samples: Samples) -> None:
    """Start servers in turn, and watch each while it is idle."""
    for _ in range(rounds):
        for group, engine in ((BF16, models.engine_bf16), (Q4, models.engine_q4)):
            found = measure_server(engine, QUESTION, LOGS / f"server-{group}.log", IDLE_SECONDS)
            samples["server_start", group, OURS].append(found.first_token_seconds)
            samples["idle", group, OURS].append(found.idle_cores * 100)
            progress(f"server, {group}: first token after {found.first_token_seconds:.1f} s")


def compare_answers(running: Collection[Running], models: Models) -> None:
    """Print the first words of each contender's answer, so that a reader can compare them."""
    prompt = models.encode(QUESTION)
    for one in running:
        tokens = one.generate([prompt], 8)["tokens"][0]
        print(
            f"{one.contender.group:6} {one.contender.name:10} answers {models.decode(tokens)!r}",
            flush=True,
        )


def run_rounds(
    running: Collection[Running],
    cases: Sequence[str],
    rounds: int,
    output: int,
    vocabulary: int,
    samples: Samples,
) -> Machine:
    limits = Contender("limits", "", sys.executable, "worker_limits.py", {}, child_environment())
    meter = Running(limits, LOGS / "limits.log")
    measured = []
    try:
        for number in range(rounds):
            measured.append(meter.ask({}))
            for load in LOADS:
                if set(load.cases) & set(cases):
                    for one in running:
                        if load.sampled and one.contender.name not in (OURS, TORCH):
                            continue
                        record(one, replace(load, output=output), vocabulary, number, samples)
            progress(f"round {number + 1} of {rounds} done")
    finally:
        meter.close()
    return Machine(*(max(each[name] for each in measured) for name in ("bandwidth", "operations")))


def fair_share() -> float:
    """Return the share of its throughput that a program with a thread per core keeps beside one
    busy thread, if all threads get as much time.
    """
    cores = usable_cores()
    return cores / (cores + 1)


@contextmanager
def busy_program() -> Iterator[None]:
    """Keep a core busy with another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def record(one: Running, load: Load, vocabulary: int, number: int, samples: Samples) -> None:
    draw = random.Random(f"{load.rows} {number}")
    tokens = range(100, min(vocabulary, 40_000))
    prompts = [draw.choices(tokens, k=load.prompt) for _ in range(load.rows)]
    timed = one.generate(prompts, load.output, load.sampled)
    key = one.contender.key
    if load.rows > 1:
        samples[load.cases[0], *key].append(load.rows * load.output / timed["seconds"])
        return
    rate = decode_rate(timed, load.output)
    if load.busy:
        with busy_program():
            busy = decode_rate(one.generate(prompts, load.output), load.output)
        samples["busy", *key].append(busy)
        samples["kept", *key].append(100 * busy / rate)
        return
    samples[load.cases[0], *key].append(rate)
    if "first_token" in load.cases:
        samples["first_token", *key].append(timed["first_seconds"] * 1e3)


def decode_rate(timed: Mapping[str, float], output: int) -> float:
    """Return the tokens per second of one stream after its first token."""
    return (output - 1) / (timed["seconds"] - timed["first_seconds"])


def print_table(
    models: Models,
    machine: Machine,
    cases: Sequence[str],
    output: int,
    samples: Samples,
    contenders: list[Contender],
) -> None:
    rows = []
    for name in cases:
        for index, group in enumerate((BF16, Q4)):
            case = CASES[name]
            work = Work.of(models.spec, WEIGHT_BYTES[group])
            figures = medians({peer: samples[name, group, peer] for peer in (OURS, *PEERS)})
            title = f"{case.title.format(output=output)}, {group}"
            rows.append(
                Row(
                    title,
                    case.unit,
                    case.higher_is_better,
                    figures,
                    case.limit(work, machine, output) or None,
                    case.goals[index],
                )
            )
    present = {contender.name for contender in contenders}
    print(
        f"\nmemory read {machine.bandwidth / 1e9:.1f} GB/s, "
        f"bf16 GEMM {machine.operations / 1e9:.0f} GFLOP/s\n"
    )
    print(render(rows, [peer for peer in PEERS if peer in present]))
    for note in {contender.note for contender in contenders if contender.note}:
        print(note)


def print_start_goals(samples: Samples) -> None:
    """Compare starts with their goals, which are times and not ratios."""
    for case, goal in START_GOALS.items():
        for group in (BF16, Q4):
            if starts := samples[case, group, OURS]:
                verdict = "met" if median(starts) <= goal else "missed"
                print(f"{case}, {group}: {median(starts):.2f} s, goal ≤ {goal} s: {verdict}")


def print_vllm_goals(samples: Samples) -> None:
    for name, case in CASES.items():
        ours = samples[name, BF16, OURS]
        theirs = samples[name, BF16, VLLM]
        if ours and theirs and case.higher_is_better:
            ratio = median(ours) / median(theirs)
            verdict = "met" if ratio >= VLLM_GOAL else "missed"
            print(f"{name}: {ratio:.2f} × vLLM, goal ≥ {VLLM_GOAL} ×: {verdict}")


def warn_when_busy() -> None:
    load = os.getloadavg()[0]
    cores = usable_cores()
    if load > cores / 4:
        print(
            f"this machine is busy (load {load:.1f} on {cores:g} cores): "
            "contenders that busy-wait are slowed down most",
            flush=True,
        )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
