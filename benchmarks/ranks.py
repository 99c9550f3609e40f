"""The step of one rank of several, compared with the hardware's limit.

    python benchmarks/ranks.py --shape llama3-8b --ranks 1,2,4,8
    python benchmarks/ranks.py --shape llama3-70b --ranks 2,4,8
    python benchmarks/ranks.py --device cpu --shape tiny --ranks 1,2    # seconds, on any machine
    python benchmarks/ranks.py --sums                                   # sums of two processes

One process runs the part of the model that one rank has, with random weights and without the other
ranks: sums over ranks and the exchange of logits take no time here. So a row is a lower limit of
the time of a step with as many GPUs, not a measurement of them. The tokens mean nothing. The row
8x1024 is the time of 8 prompts of 1,024 tokens, not of one step.

--sums measures what is missing there: the time of one sum between two processes, with gloo over the
loopback interface, and with NCCL where there are two GPUs.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs without an installed package
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from gpu import Bench, limit_seconds, synchronize
from random_models import SHAPES, random_tensors
from workloads import Workload

from slipstream.engine.loop import EngineLoop
from slipstream.engine.ranks.orders import Order, RowDigests
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import RankGroup, create_engine
from slipstream.kernels.inputs import Input
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.ranks import ALONE, AddNorm
from slipstream.kernels.torch_ranks import TorchRanks
from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import Quantisation
from slipstream.weights.shards import check_ranks, rank_spec

_SEQUENCE_TOKENS = 2304
_ROWS = (1, 8, 32, 128)
_OUTPUT_TOKENS = 64
_PROMPTS = Workload("8x1024", 8, "tok/s", (1024, 0), (1, 0))
_SUMMED_ROWS = (1, 8, 32, 128, 8192)  # the last: a step of prompts
_SUM_SECONDS = 1.0  # of each measurement


class SilentRanks:
    """Rank 0 of several, which hears nothing of the others."""

    rank = 0
    local_rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.local_size = size

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def sum_add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, norm: Norm, add_norm: AddNorm
    ) -> Input:
        return add_norm(hidden, delta, norm)

    def join(
        self, part: torch.Tensor, each: int, width: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = part.new_zeros((len(part), width))
        out[:, : part.shape[1]] = part
        return out

    def likeliest(self, part: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ALONE.likeliest(part, first)

    def best_of(
        self, best: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return best, tokens

    def least(self, number: int) -> int:
        return number

    def meet(self, description: str = "") -> None:
        return None


class NoFollowers:
    """The other ranks, which do not exist."""

    def send(self, order: Order, follower: int | None = None) -> None:
        return None

    def receive_digests(self) -> list[RowDigests]:
        return []

    def close(self) -> None:
        return None


def start_rank(whole: ModelSpec, ranks: int, device: str) -> EngineLoop:
    """Start the engine of one rank."""
    check_ranks(whole, Quantisation(), ranks)
    spec = rank_spec(whole, ranks)
    dtype = "bfloat16" if device == "cuda" else "float32"
    tensors = random_tensors(spec, device=device, dtype=dtype)
    if not spec.tied_embeddings:
        rows = len(whole.vocabulary_of(0, ranks))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:rows].clone()
    settings = EngineSettings(
        dtype=dtype, device=device, max_rows=max(_ROWS), max_sequence_tokens=_SEQUENCE_TOKENS
    )
    group = None
    if ranks > 1:
        group = RankGroup(SilentRanks(ranks), whole, NoFollowers())
    return create_engine(spec, tensors, settings, _SEQUENCE_TOKENS, group=group)


def limit_spec(whole: ModelSpec, ranks: int) -> ModelSpec:
    """Return the spec by which the limit of one rank is computed: with its part of the head."""
    return replace(rank_spec(whole, ranks), vocab_size=len(whole.vocabulary_of(0, ranks)))


def measure(shape: str, ranks: int, device: str) -> None:
    whole = SHAPES[shape]
    began = time.perf_counter()
    loop = start_rank(whole, ranks, device)
    ready = time.perf_counter() - began
    bench = Bench(loop, whole)
    limited = limit_spec(whole, ranks)
    for rows in _ROWS:
        work = Workload(str(rows), rows, "tok/s", (200, 0), (_OUTPUT_TOKENS, 0))
        print_row(bench, limited, shape, ranks, device, work, ready)
    print_row(bench, limited, shape, ranks, device, _PROMPTS, ready)
    synchronize(loop)


def print_row(
    bench: Bench,
    limited: ModelSpec,
    shape: str,
    ranks: int,
    device: str,
    work: Workload,
    ready: float,
) -> None:
    """Print the time of a decode step, or of all prompts."""
    found = bench.measure(work)
    steps = 1 if work is _PROMPTS else len(found.plans)
    limit = sum(limit_seconds(limited, plan, 2) for plan in found.plans)
    share = f"{limit / found.seconds:.0%}" if device == "cuda" else "-"
    print(
        f"{shape:12} {ranks:5} {work.name:>6} {found.seconds / steps * 1e3:9.3f} "
        f"{limit / steps * 1e3:9.3f} {share:>8} {bench.loop.info.weight_bytes / 2**30:8.1f} "
        f"{ready:6.1f}",
        flush=True,
    )


def measure_sums(shape: str) -> int:
    """Print the time of a sum between two processes, by its size."""
    backends = ["gloo", "nccl"] if torch.cuda.device_count() > 1 else ["gloo"]
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            store = f"{folder}/{backend}"
            command = [sys.executable, __file__, "--shape", shape, "--store", store]
            command += ["--backend", backend, "--sum-rank"]
            running = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
            codes = [process.wait() for process in running]
            if any(codes):
                return 1
    return 0


def run_sum_rank(shape: str, rank: int, backend: str, store: str) -> None:
    """Sum with the other process; rank 0 prints the times."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    every = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(every, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    ranks = TorchRanks()
    for rows in _SUMMED_ROWS:
        y = torch.zeros((rows, SHAPES[shape].hidden_size), dtype=torch.bfloat16, device=device)
        one = time_sums(ranks, y, 3) / 3
        count = max(1, min(10_000, int(_SUM_SECONDS / max(one, 1e-6))))
        count = ranks.least(count)
        seconds = time_sums(ranks, y, count) / count
        if rank == 0:
            print(
                f"{shape:12} {backend:6} {rows:6} rows {seconds * 1e6:12.1f} µs a sum", flush=True
            )
    ranks.meet()
    dist.destroy_process_group()


def time_sums(ranks: TorchRanks, y: torch.Tensor, count: int) -> float:
    ranks.meet()
    began = time.perf_counter()
    for _ in range(count):
        ranks.sum(y)
    if y.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="shape of the model")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks, separated by commas")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device")
    parser.add_argument("--sums", action="store_true", help="time sums of two processes instead")
    for name in ("--sum-rank", "--backend", "--store"):  # of the processes that --sums starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sum_rank is not None:
        run_sum_rank(options.shape, int(options.sum_rank), options.backend, options.store)
        return
    if options.sums:
        sys.exit(measure_sums(options.shape))
    print(
        f"{'shape':12} {'ranks':>5} {'rows':>6} {'ms/step':>9} {'limit':>9} {'of limit':>8} "
        f"{'GiB':>8} {'ready':>6}"
    )
    for ranks in map(int, options.ranks.split(",")):
        try:
            measure(options.shape, ranks, options.device)
        except (ValueError, torch.OutOfMemoryError) as error:
            print(f"{options.shape:12} {ranks:5} {str(error).partition(chr(10))[0]}", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
