"""The engine on a GPU, by workload, compared with the hardware's limit. Needs only torch and
Triton.

    python benchmarks/gpu.py --shape llama3-8b [--only thr] [--profile thr]

Random weights, greedy, no reuse, all requests queued, through the offline engine. The time includes
scheduling, sampling and the copy of tokens to the host. The peer column is not measured in the run:
it is vLLM 0.26.0 on one H200, and with --fp8 what TensorRT-LLM 1.0 publishes for it. If vLLM is
installed, it runs afterwards in the same process.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs without an installed package

import torch

from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import choose_quantisation, engine_parameters, scales_name
from slipstream.weights.quantise import quantise_fp8

SHAPES = {
    "llama3-8b": ModelSpec(
        "LlamaForCausalLM", 128256, 4096, 32, 32, 8, 128, 14336, 8192, rope_theta=500000.0
    ),
    "llama2-7b": ModelSpec("LlamaForCausalLM", 32000, 4096, 32, 32, 32, 128, 11008, 4096),
    "qwen3-0.6b": ModelSpec(
        "Qwen3ForCausalLM",
        151936,
        1024,
        28,
        16,
        8,
        128,
        3072,
        8192,
        rope_theta=1e6,
        qk_norm=True,
        tied_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Workload:
    name: str
    requests: int
    unit: str
    prompt: tuple[float, float]  # tokens: mean and deviation, or the ends of a range
    output: tuple[float, float]
    uniform: bool = False

    def draw(self) -> list[tuple[int, int]]:
        chance = random.Random(0)

        def one(pair: tuple[float, float]) -> int:
            drawn = chance.uniform(*pair) if self.uniform else chance.gauss(*pair)
            return max(1, round(drawn))

        return [(one(self.prompt), one(self.output)) for _ in range(self.requests)]


WORKLOADS = [
    Workload("c1", 1, "tok/s", (200, 0), (100, 0)),
    Workload("b32", 32, "tok/s", (128, 0), (128, 0)),
    Workload("thr", 1000, "tok/s", (128, 0), (128, 0)),
    Workload("long", 1000, "req/s", (1024, 0), (128, 0)),
    Workload("core", 5000, "req/s", (128, 5), (20, 2)),
    Workload("mix", 256, "tok/s", (100, 1024), (100, 1024), uniform=True),
]
# Workloads that TensorRT-LLM publishes for FP8 weights and cache on the same GPU, the short ones
# here with fewer requests.
FP8_WORKLOADS = [
    Workload("128/128", 4000, "tok/s", (128, 0), (128, 0)),
    Workload("1k/1k", 3000, "tok/s", (1000, 0), (1000, 0)),
    Workload("2k/128", 1500, "tok/s", (2048, 0), (128, 0)),
]
READ_BYTES_PER_SECOND = 4.30e12
FLOPS = {2: 700e12, 1: 1400e12}  # by the bytes of a weight
TARGETS = {
    "llama3-8b": {
        "c1": (240, 199),
        "b32": (6500, 5131),
        "thr": (18000, 13743),
        "long": (34, 29.3),
        "core": (280, 268.5),
        "mix": (13000, 10049),
    },
    "llama2-7b": {
        "c1": (260, 213),
        "b32": (6200, 4749),
        "thr": (15500, 11293),
        "long": (27, 21.0),
        "core": (270, 244.8),
        "mix": (7500, 5348),
    },
    "qwen3-0.6b": {
        "c1": (1200, 381),
        "b32": (24000, 9194),
        "thr": (60000, 20223),
        "long": (200, 118),
        "core": (1600, 870),
        "mix": (32000, 23541),
    },
}
FP8_TARGETS = {"128/128": (28000, 27911), "1k/1k": (18000, 17744), "2k/128": (3600, 3538)}


def random_tensors(spec: ModelSpec, fp8: bool = False) -> dict[str, torch.Tensor]:
    """Return random weights, small enough that activations stay finite."""
    torch.manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16, device="cuda")

    tensors = {
        "transformer.vocab_embedding.weight": weight(spec.vocab_size, spec.hidden_size),
        "transformer.ln_f.weight": ones(spec.hidden_size),
    }
    if not spec.tied_embeddings:
        tensors["lm_head.weight"] = weight(spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        name = f"transformer.layers.{layer}."
        tensors[f"{name}input_layernorm.weight"] = ones(spec.hidden_size)
        tensors[f"{name}post_layernorm.weight"] = ones(spec.hidden_size)
        tensors[f"{name}attention.qkv.weight"] = weight(spec.qkv_size, spec.hidden_size)
        tensors[f"{name}attention.dense.weight"] = weight(spec.hidden_size, spec.q_size)
        tensors[f"{name}mlp.gate_up.weight"] = weight(2 * spec.ffn_size, spec.hidden_size)
        tensors[f"{name}mlp.proj.weight"] = weight(spec.hidden_size, spec.ffn_size)
        if spec.qk_norm:
            tensors[f"{name}attention.q_layernorm.weight"] = ones(spec.head_size)
            tensors[f"{name}attention.k_layernorm.weight"] = ones(spec.head_size)
    for one in engine_parameters(spec, choose_quantisation(spec, "fp8" if fp8 else None)):
        if one.bits:
            tensors[one.name], tensors[scales_name(one.name)] = quantise_fp8(tensors[one.name])
    return tensors


def vllm_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": [spec.architecture],
        "model_type": "qwen3" if spec.qk_norm else "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.ffn_size,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


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

    from slipstream.weights.engine_config import BuildLimits, GenerationDefaults, config_document
    from slipstream.weights.load import start_engine
    from slipstream.weights.parameters import Quantisation

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


def run(loop, spec: ModelSpec, work: Workload, first_id: int) -> tuple[float, int, list[StepPlan]]:
    """Run a workload once; return seconds, output tokens and the plans of its steps."""
    chance = random.Random(1)
    requests = [
        GenerateRequest(
            first_id + i,
            [chance.randrange(spec.vocab_size) for _ in range(prompt)],
            SamplingParams(max_tokens=output),
        )
        for i, (prompt, output) in enumerate(work.draw())
    ]
    plans: list[StepPlan] = []
    launch = loop.runner.launch

    def record_and_launch(plan: StepPlan):
        plans.append(plan)
        return launch(plan)

    loop.runner.launch = record_and_launch
    torch.cuda.synchronize()
    began = time.perf_counter()
    tokens = 0
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        outputs = loop.step()
        tokens += len(outputs.tokens) if outputs is not None else 0
    seconds = time.perf_counter() - began
    loop.runner.launch = launch
    return seconds, tokens, plans


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
        "--fp8", action="store_true", help="FP8 weights and cache, with workloads of their own"
    )
    parser.add_argument("--rows", type=int, default=1024, help="running requests (default: 1024)")
    parser.add_argument(
        "--step-tokens", type=int, default=8192, help="token budget of a step (default: 8192)"
    )
    parser.add_argument(
        "--from-folder", action="store_true", help="only time the start from an engine folder"
    )
    parser.add_argument("--profile", help="print a profile of one run of this workload")
    return parser.parse_args()


def report(loop, spec: ModelSpec, work: Workload, index: int, options: argparse.Namespace) -> None:
    """Run a workload and print its line of the table."""
    if work.name in ("c1", "b32"):  # short ones are warmed up
        run(loop, spec, work, 10**6 * (index + 50))
    seconds, tokens, plans = run(loop, spec, work, 10**6 * index)
    figure = tokens / seconds if work.unit == "tok/s" else work.requests / seconds
    target, peer = FP8_TARGETS[work.name] if options.fp8 else TARGETS[options.shape][work.name]
    share = sum(limit_seconds(spec, plan, 1 if options.fp8 else 2) for plan in plans) / seconds
    print(
        f"{work.name:8} {figure:10.1f} {work.unit:6} {share:8.0%} {target:8} {peer:8} "
        f"{figure / peer:7.2f} {seconds / len(plans) * 1e3:8.2f}",
        flush=True,
    )
    loop.check_integrity()


def main() -> None:
    options = parse_options()
    spec = SHAPES[options.shape]
    began = time.perf_counter()
    settings = EngineSettings(
        max_rows=options.rows,
        reuse=False,
        step_tokens=options.step_tokens,
        max_sequence_tokens=2304,
    )
    if options.from_folder:
        return from_folder(options.shape, spec, settings)
    tensors = random_tensors(spec, options.fp8)
    loop = create_engine(spec, tensors, settings, spec.max_positions, fp8_cache=options.fp8)
    torch.cuda.synchronize()
    # An engine's process does the same after its start.
    gc.collect()
    gc.freeze()
    print(
        f"{options.shape}: ready in {time.perf_counter() - began:.1f} s, "
        f"{loop.info.total_blocks} blocks, {torch.cuda.memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )
    print(
        f"{'workload':8} {'figure':>10} {'unit':6} {'of limit':>8} {'target':>8} {'peer':>8} "
        f"{'× peer':>7} {'ms/step':>8}"
    )
    works = FP8_WORKLOADS if options.fp8 else WORKLOADS
    for index, work in enumerate(works):
        if not options.only or work.name in options.only:
            report(loop, spec, work, index, options)
    if importlib.util.find_spec("vllm") is not None and not options.fp8:
        del loop
        torch.cuda.empty_cache()
        run_vllm(spec, [w for w in WORKLOADS if not options.only or w.name in options.only])
    elif options.profile:
        profile(loop, spec, next(w for w in WORKLOADS + FP8_WORKLOADS if w.name == options.profile))


def profile(loop, spec: ModelSpec, work: Workload) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        seconds, _, plans = run(loop, spec, work, 10**9)
    print(f"{work.name}: {seconds:.2f} s, {len(plans)} steps")
    print(
        recorded.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=60
        )
    )


if __name__ == "__main__":
    main()
