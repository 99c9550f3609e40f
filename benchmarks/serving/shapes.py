"""The models of `online.py`: random weights of a shape, and a tokenizer with text for each token.

An engine folder is written directly. Where a peer serves the same weights, a Hugging Face folder is
written and imported.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import random_models
from tokenizers import Tokenizer

from slipstream.model.spec import ModelSpec
from slipstream.version import VERSION
from slipstream.weights.engine_config import BuildLimits, GenerationDefaults, config_document
from slipstream.weights.parameters import Quantisation

SHAPES = {
    "tiny": random_models.SHAPES["tiny"],
    "llama3-8b-49k": replace(random_models.SHAPES["llama3-8b"], vocab_size=49152),
    "qwen3-0.6b": random_models.SHAPES["qwen3-0.6b"],
}
_FIRST_PLAIN = 16  # the first tokens of many vocabularies are special
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Model:
    """A model on disk."""

    name: str
    engine: Path
    dtype: str
    hugging_face: Path | None = None  # the same weights, for peers
    gguf: Path | None = None  # the same weights, for llama.cpp

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.engine / "tokenizer.json"))


def write_number_tokenizer(folder: Path, words: int) -> None:
    """Write a tokenizer whose tokens are the numbers below `words`, separated by spaces."""
    vocabulary = {str(number): number for number in range(words)}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def copy_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """Copy a tokenizer. Tokens beyond its vocabulary become words that no text is split into."""
    document = json.loads((source / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = document["model"]["vocab"]
    added = {token["id"] for token in document.get("added_tokens", [])}
    taken = added | set(vocabulary.values())
    if max(taken) >= vocab_size:
        raise SystemExit(f"{source}: the tokenizer has more tokens than the model's {vocab_size}")
    for token in range(vocab_size):
        if token not in taken:
            vocabulary[f"Ġtoken{token}"] = token
    (folder / "tokenizer.json").write_text(json.dumps(document))
    for name in _TOKENIZER_FILES[1:]:
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())


def _write_tokenizer(folder: Path, spec: ModelSpec, tokenizer: Path | None) -> None:
    if tokenizer is None:
        write_number_tokenizer(folder, spec.vocab_size)
    else:
        copy_tokenizer(tokenizer, folder, spec.vocab_size)


def write_engine(shape: str, folder: Path, tokenizer: Path | None, device: str) -> Model:
    """Write an engine folder with random weights: bfloat16 on a GPU, float32 on a CPU."""
    from safetensors.torch import save_file

    spec = SHAPES[shape]
    dtype = "bfloat16" if device == "cuda" else "float32"
    if (folder / "config.json").exists():
        return Model(shape, folder, dtype)
    folder.mkdir(parents=True)
    tensors = random_models.random_tensors(spec, device=device, dtype=dtype)
    _write_tokenizer(folder, spec, tokenizer)
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / "rank0.engine")
    del tensors
    _free_gpu_memory()
    document = config_document(
        VERSION,
        spec,
        dtype,
        Quantisation(),
        BuildLimits.for_model(spec),
        GenerationDefaults(),
        {"content_hash": "", "files": {}},
    )
    (folder / "config.json").write_text(json.dumps(document))
    return Model(shape, folder, dtype)


def _free_gpu_memory() -> None:
    """Return the memory of deleted tensors to the GPU, for the servers."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_for_peers(shape: str, folder: Path, tokenizer: Path | None, device: str) -> Model:
    """Write a Hugging Face folder with random weights, and the engine that is built from it."""
    from safetensors.torch import save_file

    from slipstream.weights.build import build_engine

    spec = SHAPES[shape]
    dtype = "bfloat16" if device == "cuda" else "float32"
    source = folder / "hugging-face"
    if (folder / "engine" / "config.json").exists():
        return Model(shape, folder / "engine", dtype, source)
    source.mkdir(parents=True)
    save_file(_hugging_face_tensors(spec, device, dtype), source / "model.safetensors")
    _free_gpu_memory()
    config = random_models.vllm_config(spec) | {"torch_dtype": dtype}
    (source / "config.json").write_text(json.dumps(config))
    _write_tokenizer(source, spec, tokenizer)
    engine = build_engine(source, folder / "engine", dtype=dtype)
    return Model(shape, engine, dtype, source)


def _hugging_face_tensors(spec: ModelSpec, device: str, dtype: str) -> dict[str, Any]:
    """Return random weights by the names of Hugging Face. Fused matrices are split."""
    tensors: dict[str, Any] = {}
    for name, value in random_models.random_tensors(spec, device=device, dtype=dtype).items():
        whole = value.cpu()
        name = name.replace("transformer.layers", "model.layers")
        if ".attention.qkv." in name:
            parts = whole.split([spec.q_size, spec.kv_size, spec.kv_size])
            for part, letter in zip(parts, "qkv", strict=True):
                place = name.replace("attention.qkv", f"self_attn.{letter}_proj")
                tensors[place] = part.contiguous()
        elif ".mlp.gate_up." in name:
            gate, up = whole.chunk(2)
            tensors[name.replace("gate_up", "gate_proj")] = gate.contiguous()
            tensors[name.replace("gate_up", "up_proj")] = up.contiguous()
        else:
            tensors[_renamed(name)] = whole
    return tensors


_NAMES = {
    "transformer.vocab_embedding": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "attention.dense": "self_attn.o_proj",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
    "post_layernorm": "post_attention_layernorm",
    "mlp.proj": "mlp.down_proj",
}


def _renamed(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def default_model() -> Model:
    """Return the packaged model, SmolLM2-135M, in bfloat16, with the files that peers serve."""
    from models import prepare_models

    models = prepare_models()
    return Model(
        "smollm2-135m",
        models.engine_bf16,
        "bfloat16",
        models.hugging_face,
        models.gguf_bf16,
    )


@dataclass(frozen=True)
class Prompts:
    """Random texts of an exact number of tokens."""

    texts: list[str]
    tokens: list[list[int]]


def prompt_maker(model: Model) -> Callable[[int, int, int], Prompts]:
    """Return a function of count, tokens and seed that makes random prompts."""
    tokenizer = model.tokenizer
    words = _whole_words(tokenizer)

    def make(count: int, length: int, seed: int) -> Prompts:
        chance = random.Random(seed)
        drawn = [_exact(tokenizer, words, chance, length) for _ in range(count)]
        return Prompts([text for text, _ in drawn], [tokens for _, tokens in drawn])

    return make


def _whole_words(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens whose text is a word after a space and is split into this token alone."""
    found = []
    for text, token in tokenizer.get_vocab().items():
        word = text.removeprefix("Ġ")
        if token >= _FIRST_PLAIN and word.isascii() and word.isalpha() and word != text:
            if not word.startswith("token"):
                found.append(token)
        elif text.isdigit() and not tokenizer.token_to_id("Ġthe"):
            found.append(token)
    return sorted(found)


def _exact(
    tokenizer: Tokenizer, words: list[int], chance: random.Random, length: int
) -> tuple[str, list[int]]:
    """Return a text of exactly `length` tokens, and its tokens."""
    for _ in range(100):
        text = tokenizer.decode(chance.choices(words, k=length))
        tokens = tokenizer.encode(text).ids
        if len(tokens) == length:
            return text, tokens
    raise SystemExit(f"no text of exactly {length} tokens was found")
