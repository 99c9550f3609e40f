"""One engine beside several replicas of it on the same machine, and prefix-aware routing beside
random choice.

    python benchmarks/replicas.py [--engine FOLDER] [--replicas 2] [--conversations 100]

Streams: random prompts, all at once. Conversations: a system prompt that all share, and turns that
begin with all turns before them. Both run over the engine processes and the router that a server
uses, without HTTP. On a CPU the replicas divide the cores. A turn counts as reused if its engine
had the turn before, up to one block of 32 tokens: the last block of an answer is rarely full.
Without --engine, the engine has random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# makes the benchmark run from a checkout that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.client import EngineClient, request_ids
from slipstream.server.engine_link.engine import UNASSIGNED, Engine
from slipstream.server.engine_link.replicas import Replicas
from slipstream.server.engine_link.routing import Policy

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SYSTEM_TOKENS = 96
TURNS = 8
POLICIES: tuple[Policy, ...] = ("prefix", "load", "random")


@dataclass(frozen=True)
class Figures:
    tokens_per_second: float
    first_token_ms: float  # median
    requests: tuple[int, ...]  # of each replica
    reused: float | None = None  # share of the turns after the first


def write_random_engine(folder: Path) -> Path:
    """Build an engine of a small Llama with random weights."""
    import torch
    from safetensors.torch import save_file

    from slipstream.weights.build import build_engine

    source = folder / "model"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(CONFIG))
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(8192)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text("{}")
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.randn(shape).to(torch.bfloat16) * 0.02
        for name, shape in _shapes().items()
    }
    save_file(tensors, source / "model.safetensors")
    return Path(build_engine(source, folder / "engine"))


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, ffn, kv = 384, 1024, 192
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (8192, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(8):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
            f"{name}self_attn.q_proj.weight": (hidden, hidden),
            f"{name}self_attn.k_proj.weight": (kv, hidden),
            f"{name}self_attn.v_proj.weight": (kv, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, hidden),
            f"{name}mlp.gate_proj.weight": (ffn, hidden),
            f"{name}mlp.up_proj.weight": (ffn, hidden),
            f"{name}mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached_tokens: int
    first_token_seconds: float


async def ask(engine: Engine, prompt: list[int], count: int) -> Answer:
    began = time.monotonic()
    first = 0.0
    tokens: list[int] = []
    cached = 0
    sampling = SamplingParams(max_tokens=count)
    async for output in engine.submit(GenerateRequest(UNASSIGNED, prompt, sampling)):
        first = first or time.monotonic() - began
        tokens += output.tokens
        cached = max(cached, output.cached_tokens)
        if output.error:
            raise RuntimeError(output.error)
    return Answer(tokens, cached, first)


async def run_streams(engine: Replicas, count: int) -> Figures:
    """Run random prompts at once."""
    chance = random.Random(1)
    prompts = [[chance.randrange(8192) for _ in range(128)] for _ in range(count)]
    began = time.monotonic()
    answers = await asyncio.gather(*(ask(engine, prompt, 128) for prompt in prompts))
    return _figures(engine, answers, time.monotonic() - began)


async def run_conversations(engine: Replicas, count: int, at_once: int, block: int) -> Figures:
    """Hold conversations, a number of them at a time."""
    places = asyncio.Semaphore(at_once)
    system = [random.Random(2).randrange(8192) for _ in range(SYSTEM_TOKENS)]
    answers: list[Answer] = []
    reused = 0

    async def converse(seed: int) -> None:
        nonlocal reused
        chance = random.Random(seed)
        tokens = list(system)
        for turn in range(TURNS):
            before = len(tokens) // block * block
            tokens += [chance.randrange(8192) for _ in range(chance.randrange(16, 64))]
            async with places:
                answer = await ask(engine, list(tokens), chance.randrange(16, 64))
            reused += turn > 0 and answer.cached_tokens >= before - block
            tokens += answer.tokens
            answers.append(answer)

    began = time.monotonic()
    await asyncio.gather(*(converse(seed) for seed in range(count)))
    figures = _figures(engine, answers, time.monotonic() - began)
    return replace(figures, reused=reused / (count * (TURNS - 1)))


def _figures(engine: Replicas, answers: Sequence[Answer], seconds: float) -> Figures:
    return Figures(
        sum(len(answer.tokens) for answer in answers) / seconds,
        1000 * statistics.median(answer.first_token_seconds for answer in answers),
        tuple(client.stats.finished for client in engine.clients),
    )


async def measure(
    folder: Path, settings: EngineSettings, policy: Policy, given: argparse.Namespace
) -> tuple[Figures, Figures]:
    """Start the replicas; return the figures of streams and of conversations."""
    ids = request_ids()
    engine = Replicas(
        [
            EngineClient(folder, replace(settings, replica=index), ids=ids)
            for index in range(settings.replicas)
        ],
        policy,
    )
    await engine.start()
    assert engine.info is not None
    try:
        await run_streams(engine, settings.replicas)  # warm
        streams = await run_streams(engine, given.streams)
        conversations = await run_conversations(
            engine, given.conversations, given.at_once, engine.info.block_tokens
        )
    finally:
        await engine.stop()
    return streams, conversations


def print_row(title: str, streams: Figures, conversations: Figures) -> None:
    reused = f"{conversations.reused:.0%}" if conversations.reused is not None else ""
    requests = "/".join(map(str, conversations.requests))
    print(
        f"{title:<24}{streams.tokens_per_second:>12.0f}{streams.first_token_ms:>12.0f}"
        f"{conversations.tokens_per_second:>14.0f}{conversations.first_token_ms:>12.0f}"
        f"{reused:>9}  {requests}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", type=Path, help="engine folder (default: random weights)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=16, help="conversations at a time")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--cache-tokens", type=int, default=131_072, help="of each replica")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = given.engine or write_random_engine(Path(folder))
        settings = EngineSettings(device=given.device, cache_tokens=given.cache_tokens)
        heads = ("streams tok/s", "TTFT ms", "turns tok/s", "TTFT ms", "reused")
        widths = (37, 12, 14, 12, 9)
        line = "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
        print(f"{line[1:]}  requests")
        print_row("1 engine", *asyncio.run(measure(engine, settings, "prefix", given)))
        several = replace(settings, replicas=given.replicas)
        for policy in POLICIES:
            title = f"{given.replicas} replicas, {policy}"
            print_row(title, *asyncio.run(measure(engine, several, policy, given)))


if __name__ == "__main__":
    main()
