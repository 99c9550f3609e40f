"""The engine on a GPU, by workload, compared with the hardware's limit. Needs only torch and
Triton.

    python benchmarks/gpu.py --shape llama3-8b [--only thr] [--profile thr]
    python benchmarks/gpu.py --sampling top_p --sampling all    # beside greedy, in the same run
    python benchmarks/gpu.py --device cpu --shape tiny --requests 4    # seconds, on any machine

Random weights, all requests queued, through the offline engine. The engine has the settings of a
served one: rows, tokens per step, longest sequence and prefix reuse are the defaults, decided from
the model and the machine. Prompts are random and differ from run to run, so nothing is reused. The
time includes scheduling, sampling and the copy of tokens to the host.

The peer column is not measured in the run: it is vLLM 0.26.0 on one H200, and with --fp8 what
TensorRT-LLM 1.0 publishes for it. If vLLM is installed, it runs afterwards in the same process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs without an installed package
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from random_models import SHAPES, random_tensors, vllm_config
from workloads import (
    FP8_TARGETS,
    FP8_WORKLOADS,
    SAMPLING,
    TARGETS,
    WORKLOADS,
    Workload,
    make_requests,
)

from slipstream.engine.loop import EngineLoop
from slipstream.engine.memory.garbage_collection import freeze_garbage_collector
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.kernels.gpu.compilation.pool import start_pool
from slipstream.model.spec import ModelSpec
from slipstream.weights.engine_config import BuildLimits, GenerationDefaults, config_document
from slipstream.weights.parameters import Quantisation

ROOT = Path(__file__).resolve().parents[1]
READ_BYTES_PER_SECOND = 4.30e12
FLOPS = {2: 700e12, 1: 1400e12}  # by the bytes of a weight
# A run is preceded by a short one, so that no kernel runs for the first time.
WARM_UP_REQUESTS = 32
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Measured:
    """One run of a workload."""

    seconds: float
    tokens: int  # output tokens
    plans: list[StepPlan]  # of its steps

    def figure(self, work: Workload) -> float:
        return (self.tokens if work.unit == "tok/s" else work.requests) / self.seconds


class Bench:
    """Runs workloads on one engine."""

    def __init__(self, loop: EngineLoop, spec: ModelSpec) -> None:
        self.loop = loop
        self.spec = spec
        self._runs = 0

    def measure(self, work: Workload, sampling: str = "greedy") -> Measured:
        """Run a workload once, after a short run of the same kind."""
        short = work.limited(WARM_UP_REQUESTS)
        self._run(self._requests(short, sampling, WARM_UP_TOKENS))
        return self.run_once(work, sampling)

    def run_once(self, work: Workload, sampling: str = "greedy") -> Measured:
        found = self._run(self._requests(work, sampling))
        self.loop.check_integrity()
        return found

    def _requests(
        self, work: Workload, sampling: str, most_output: int | None = None
    ) -> list[GenerateRequest]:
        self._runs += 1
        return make_requests(work, self.spec.vocab_size, sampling, self._runs, most_output)

    def _run(self, requests: list[GenerateRequest]) -> Measured:
        plans: list[StepPlan] = []
        launch = self.loop.runner.launch

        def record_and_launch(plan: StepPlan):
            plans.append(plan)
            return launch(plan)

        self.loop.runner.launch = record_and_launch
        synchronize(self.loop)
        began = time.perf_counter()
        tokens = 0
        for request in requests:
            self.loop.submit(request)
        while self.loop.has_work():
            outputs = self.loop.step()
            tokens += len(outputs.tokens) if outputs is not None else 0
        seconds = time.perf_counter() - began
        self.loop.runner.launch = launch
        expected = sum(request.sampling.max_tokens for request in requests)
        if tokens != expected:
            raise SystemExit(f"{tokens} output tokens in place of {expected}: requests failed")
        return Measured(seconds, tokens, plans)


def synchronize(loop: EngineLoop) -> None:
    if loop.info.device.startswith("cuda"):
        torch.cuda.synchronize()


def served_settings(options: argparse.Namespace) -> EngineSettings:
    """Return the settings of a served engine, but for what the command line changes."""
    return EngineSettings(
        dtype="bfloat16" if options.device == "cuda" else "float32",
        device=options.device,
        max_rows=options.rows,
        step_tokens=options.step_tokens,
        max_sequence_tokens=options.sequence_tokens,
        reuse=options.reuse,
        max_beam_width=BuildLimits.max_beam_width,
        deterministic=options.deterministic,
    )


def start(spec: ModelSpec, settings: EngineSettings, fp8: bool = False) -> EngineLoop:
    """Start an engine with random weights as a server starts one from a folder."""
    on_gpu = settings.device == "cuda"
    identity = f"gpu.py {spec} {fp8} {settings}"
    os.environ.setdefault("PYTHONPATH", str(ROOT))  # of the processes that compile kernels
    compiler = start_pool(identity) if on_gpu else None
    try:
        tensors = random_tensors(spec, fp8, settings.device, settings.dtype)
        if on_gpu:
            torch.cuda.empty_cache()  # a served engine finds no memory of temporary tensors
        build = BuildLimits.for_model(spec)  # of an engine that was built without limits
        loop = create_engine(
            spec,
            tensors,
            settings,
            build.max_seq_len,
            fp8_cache=fp8,
            most_step_tokens=build.chosen("max_num_tokens"),
            most_rows=build.chosen("max_batch_size"),
            compiler=compiler,
        )
    finally:
        if compiler is not None:
            compiler.close()
    synchronize(loop)
    freeze_garbage_collector()  # as an engine's process does after its start
    return loop


def run_vllm(spec: ModelSpec, works: list[Workload]) -> None:
    """Run vLLM over the same workloads: random weights of the same shape, greedy, no reuse."""
    from vllm import LLM
    from vllm import SamplingParams as Parameters

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(vllm_config(spec)))
        engine = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2304,
        )
    for work in works:
        chance = random.Random(1)
        drawn = work.draw()
        prompts = [
            {"prompt_token_ids": [chance.randrange(spec.vocab_size) for _ in range(p)]}
            for p, _ in drawn
        ]
        parameters = [
            Parameters(temperature=0.0, max_tokens=o, ignore_eos=True, detokenize=False)
            for _, o in drawn
        ]
        began = time.perf_counter()
        engine.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - began
        done = sum(o for _, o in drawn) if work.unit == "tok/s" else work.requests
        print(f"vLLM, this run: {work.name:8} {done / seconds:10.1f} {work.unit}", flush=True)


def from_folder(shape: str, spec: ModelSpec, settings: EngineSettings) -> None:
    """Write an engine folder of the shape and time a start from it, with its pages in memory."""
    from safetensors.torch import save_file

    from slipstream.weights.load import start_engine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {key: value.cpu() for key, value in random_tensors(spec).items()}
        save_file(tensors, folder / "rank0.engine")
        del tensors
        torch.cuda.empty_cache()
        document = config_document(
            "0",
            spec,
            "bfloat16",
            Quantisation(),
            BuildLimits.for_model(spec),
            GenerationDefaults(),
            {"content_hash": "", "files": {}},
        )
        (folder / "config.json").write_text(json.dumps(document))
        began = time.perf_counter()
        loop = start_engine(folder, settings)
        torch.cuda.synchronize()
        print(
            f"{shape}: engine folder to ready in {time.perf_counter() - began:.1f} s "
            f"(weights {loop.info.weight_bytes / 2**30:.1f} GiB)",
            flush=True,
        )


def limit_seconds(spec: ModelSpec, plan: StepPlan, weight_bytes: int) -> float:
    """Return the least time that the hardware needs for a step.

    That is the arithmetic of the GEMMs or the reading of the weights, whichever takes longer, plus
    the attention of prompts and the reading of keys and values of decode rows. The limit assumes 16
    bits. Keys, values and, in steps of few tokens, weights are stored in 12 bits, so a step may be
    faster than the limit.
    """
    head = spec.vocab_size * spec.hidden_size
    body = spec.parameters() - (1 if spec.tied_embeddings else 2) * head
    samples = sum(plan.samples)
    # behind the last attention, only the sampled tokens are computed
    behind = spec.hidden_size * (spec.q_size + 3 * spec.ffn_size)
    arithmetic = (
        2 * (body * plan.tokens - behind * (plan.tokens - samples)) / FLOPS[weight_bytes]
        + 2 * head * samples / FLOPS[2]
    )
    reading = (weight_bytes * body + (2 * head if samples else 0)) / READ_BYTES_PER_SECOND
    cached = sum(p + 1 for p, count in zip(plan.positions, plan.counts, strict=True) if count == 1)
    pairs = sum(c * (p + c / 2) for p, c in zip(plan.positions, plan.counts, strict=True) if c > 1)
    attention = (
        cached * 2 * spec.layers * spec.kv_size * weight_bytes / READ_BYTES_PER_SECOND
        + 4 * spec.layers * spec.q_size * pairs / FLOPS[2]
    )
    return max(arithmetic, reading) + attention


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="llama3-8b", help="shape (default: llama3-8b)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[w.name for w in WORKLOADS + FP8_WORKLOADS],
        help="run this workload only; may be given several times",
    )
    parser.add_argument(
        "--sampling",
        action="append",
        choices=SAMPLING,
        help="also run each workload with this sampling; may be given several times",
    )
    parser.add_argument(
        "--fp8", action="store_true", help="FP8 weights and cache, with workloads of their own"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="device (default: cuda)"
    )
    parser.add_argument(
        "--requests", type=int, help="most requests of a workload (default: all of them)"
    )
    add_engine_options(parser)
    parser.add_argument(
        "--from-folder", action="store_true", help="only time the start from an engine folder"
    )
    parser.add_argument("--profile", help="also profile this workload, with each sampling")
    return parser.parse_args()


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add options for what a served engine decides itself."""
    served = "(default: as served)"
    parser.add_argument("--rows", type=int, help=f"requests that run at the same time {served}")
    parser.add_argument("--step-tokens", type=int, help=f"token budget of a step {served}")
    parser.add_argument(
        "--sequence-tokens", type=int, help=f"tokens of the longest sequence {served}"
    )
    parser.add_argument(
        "--reuse",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the blocks of earlier prompts (default: yes, as served)",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same tokens whatever else runs"
    )


def describe(shape: str, loop: EngineLoop, seconds: float) -> str:
    info = loop.info
    used = info.weight_bytes + info.compressed_weight_bytes + info.cache_bytes
    return (
        f"{shape}: ready in {seconds:.1f} s, {info.max_rows} rows, "
        f"{loop.scheduler.step_tokens} tokens a step, sequences of {info.max_sequence_tokens}, "
        f"{info.total_blocks} blocks, weights and cache {used / 2**30:.1f} GiB"
    )


def report(bench: Bench, work: Workload, options: argparse.Namespace) -> None:
    """Run a workload with each sampling, and print a line of the table for each."""
    targets = FP8_TARGETS if options.fp8 else TARGETS.get(options.shape, {})
    target, peer = targets.get(work.name, (None, None))
    greedy = 0.0
    for sampling in dict.fromkeys(["greedy", *(options.sampling or [])]):
        measured = bench.measure(work, sampling)
        figure = measured.figure(work)
        greedy = greedy or figure
        weight_bytes = 1 if options.fp8 else 2
        limit = sum(limit_seconds(bench.spec, plan, weight_bytes) for plan in measured.plans)
        share = f"{limit / measured.seconds:.0%}" if options.device == "cuda" else "-"
        against = f"{figure / peer:.2f}" if peer else "-"
        print(
            f"{work.name:8} {sampling:11} {figure:10.1f} {work.unit:6} {figure / greedy:8.3f} "
            f"{share:>8} {target or '-':>8} {peer or '-':>8} {against:>7} "
            f"{measured.seconds / len(measured.plans) * 1e3:8.2f}",
            flush=True,
        )


def main() -> None:
    options = parse_options()
    spec = SHAPES[options.shape]
    if options.from_folder:
        return from_folder(options.shape, spec, served_settings(options))
    began = time.perf_counter()
    loop = start(spec, served_settings(options), options.fp8)
    print(describe(options.shape, loop, time.perf_counter() - began), flush=True)
    print(
        f"{'workload':8} {'sampling':11} {'figure':>10} {'unit':6} {'× greedy':>8} {'of limit':>8} "
        f"{'target':>8} {'peer':>8} {'× peer':>7} {'ms/step':>8}"
    )
    works = [
        work.limited(options.requests or work.requests)
        for work in (FP8_WORKLOADS if options.fp8 else WORKLOADS)
        if not options.only or work.name in options.only
    ]
    bench = Bench(loop, spec)
    for work in works:
        report(bench, work, options)
    if options.profile:
        work = next(w for w in WORKLOADS + FP8_WORKLOADS if w.name == options.profile)
        for sampling in dict.fromkeys(["greedy", *(options.sampling or [])]):
            profile(bench, work, sampling)
    elif options.device == "cuda" and not options.fp8 and importlib.util.find_spec("vllm"):
        del loop, bench
        torch.cuda.empty_cache()
        run_vllm(spec, works)


def profile(bench: Bench, work: Workload, sampling: str) -> None:
    """Print the kernels that take most of the time of a run."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        measured = bench.run_once(work, sampling)
    print(f"{work.name}, {sampling}: {measured.seconds:.2f} s, {len(measured.plans)} steps")
    print(
        recorded.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=60
        )
    )


if __name__ == "__main__":
    main()
