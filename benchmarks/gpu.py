"""The engine on a GPU, workload by workload, beside the hardware's limit. Needs torch and Triton
only.

    python benchmarks/gpu.py --shape llama3-8b [--only thr] [--profile thr]

Random weights, greedy, no reuse, all requests queued, through the offline engine: scheduling,
sampling and the copy of tokens to the host included. The peer column is not part of the run: what
vLLM 0.26.0 did on one H200, and with --fp8 what TensorRT-LLM 1.0 publishes for it. Where vLLM is
installed, it runs afterwards in the same process.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a bare box has no installed package

import torch

from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine.start import create_engine
from slipstream.model.spec import ModelSpec
from slipstream.server.engine_link.serve import freeze_garbage_collector
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
    prompt: tuple[float, float]  # mean and deviation, or the ends of a range
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
# What TensorRT-LLM publishes for eight-bit weights and cache on the same GPU; of the short ones
# fewer requests.
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
    """Weights of the right shapes, small enough that activations stay finite."""
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


def run_vllm(shape: str, spec: ModelSpec, works: list[Workload]) -> dict[str, float]:
    """vLLM over the same workloads: random weights of the same shape, greedy, no reuse. Only where
    it is installed.
    """
    import json
    import tempfile

    from vllm import LLM
    from vllm import SamplingParams as Parameters

    config = {
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
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2304,
        )
    figures = {}
    for work in works:
        chance, drawn = random.Random(1), work.draw()
        prompts = [
            {"prompt_token_ids": [chance.randrange(spec.vocab_size) for _ in range(p)]}
            for p, _ in drawn
        ]
        wanted = [
            Parameters(temperature=0.0, max_tokens=o, ignore_eos=True, detokenize=False)
            for _, o in drawn
        ]
        began = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - began
        figures[work.name] = (
            sum(o for _, o in drawn) if work.unit == "tok/s" else work.requests
        ) / seconds
        print(f"vLLM, this run: {work.name:8} {figures[work.name]:10.1f} {work.unit}", flush=True)
    return figures


def from_folder(shape: str, spec: ModelSpec, settings: EngineSettings) -> None:
    """Write an engine folder of the shape and time a start from it, its pages still in memory."""
    import json
    import tempfile

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
    """Seconds, output tokens and the steps' plans of one pass over the workload."""
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

    def noted(plan: StepPlan):
        plans.append(plan)
        return launch(plan)

    loop.runner.launch = noted
    torch.cuda.synchronize()
    began, tokens = time.perf_counter(), 0
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        outputs = loop.step()
        tokens += len(outputs.tokens) if outputs is not None else 0
    seconds = time.perf_counter() - began
    loop.runner.launch = launch
    return seconds, tokens, plans


def limit_seconds(spec: ModelSpec, plan: StepPlan, weight_bytes: int) -> float:
    """Time in which the hardware could do a step: its products' arithmetic or the weights read,
    whichever takes longer, then the attention of prompts, and the keys and values of rows with one
    token read. Keys, values and, in steps of few tokens, weights are read in twelve bits of these
    sixteen, which may be faster.
    """
    head = spec.vocab_size * spec.hidden_size
    body = spec.parameters() - (1 if spec.tied_embeddings else 2) * head
    samples = sum(plan.samples)
    # the last attention: nobody reads other tokens'
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument(
        "--only", action="append", choices=[w.name for w in WORKLOADS + FP8_WORKLOADS]
    )
    parser.add_argument(
        "--fp8", action="store_true", help="eight-bit weights and cache, and their own workloads"
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument(
        "--from-folder", action="store_true", help="time the start from an engine folder, no more"
    )
    parser.add_argument("--profile", help="write a profile of one pass of the named workload")
    options = parser.parse_args()
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
    freeze_garbage_collector()  # as an engine's process does
    print(
        f"{options.shape}: ready in {time.perf_counter() - began:.1f} s, {loop.info.total_blocks} blocks, "
        f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )
    print(
        f"{'workload':8} {'figure':>10} {'unit':6} {'of limit':>8} {'target':>8} {'peer':>8} {'× peer':>7} "
        f"{'ms/step':>8}"
    )
    for index, work in enumerate(FP8_WORKLOADS if options.fp8 else WORKLOADS):
        if options.only and work.name not in options.only:
            continue
        if work.name in ("c1", "b32"):
            run(loop, spec, work, 10**6 * (index + 50))
        seconds, tokens, plans = run(loop, spec, work, 10**6 * index)
        figure = tokens / seconds if work.unit == "tok/s" else work.requests / seconds
        target, peer = FP8_TARGETS[work.name] if options.fp8 else TARGETS[options.shape][work.name]
        share = sum(limit_seconds(spec, plan, 1 if options.fp8 else 2) for plan in plans) / seconds
        print(
            f"{work.name:8} {figure:10.1f} {work.unit:6} {share:8.0%} {target:8} {peer:8} {figure / peer:7.2f} "
            f"{seconds / len(plans) * 1e3:8.2f}",
            flush=True,
        )
        loop.check_integrity()
    if importlib.util.find_spec("vllm") is not None and not options.fp8:
        del loop
        torch.cuda.empty_cache()
        run_vllm(
            options.shape,
            spec,
            [w for w in WORKLOADS if not options.only or w.name in options.only],
        )
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
