"""The parts of an engine that its ranks hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_models import FAMILIES, FORMATS, VOCABULARY, build_rank_engine, save_rank_model
from run_engine import logits_of
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, on_ranks

from slipstream.model.spec import Experts, ModelSpec
from slipstream.model.transformer import Transformer
from slipstream.weights.engine_folder import EngineFolder
from slipstream.weights.parameters import Quantisation
from slipstream.weights.shards import check_ranks, possible_ranks, rank_spec, rank_tensors

LLAMA = ModelSpec("LlamaForCausalLM", VOCABULARY, 64, 2, 8, 4, 16, 96, 256)
COLUMNS = (".attention.dense", ".mlp.proj", ".shared.proj", ".experts.proj")


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that builds the engine of a family and format once."""
    folder = tmp_path_factory.mktemp("shards")
    built: dict[tuple[str, str | None], EngineFolder] = {}

    def build(family: str, weight_only: str | None) -> EngineFolder:
        if (family, weight_only) not in built:
            model = folder / family
            if not model.exists():
                save_rank_model(family, model)
            engine = folder / f"{family}-{weight_only}"
            built[family, weight_only] = build_rank_engine(model, engine, weight_only)
        return built[family, weight_only]

    return build


def join_qkv(parts: list[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
    local = rank_spec(spec, len(parts))
    sizes = [local.q_size, local.kv_size, local.kv_size]
    queries, keys, values = zip(*(part.split(sizes) for part in parts), strict=True)
    copies = max(1, len(parts) // spec.kv_heads)  # ranks that have the same KV head
    for rank in range(len(parts)):
        assert torch.equal(keys[rank], keys[rank - rank % copies])
        assert torch.equal(values[rank], values[rank - rank % copies])
    return torch.cat([*queries, *keys[::copies], *values[::copies]])


def join_halves(parts: list[torch.Tensor], halves: int) -> torch.Tensor:
    """Join parts that each hold the same share of every half: gate and up of every expert."""
    shares = [part.chunk(halves) for part in parts]
    return torch.cat([share[half] for half in range(halves) for share in shares])


def join(name: str, parts: list[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
    """Join a tensor's parts by the rules of tensor parallelism, written without the code."""
    linear, _, kind = name.rpartition(".")
    experts = spec.experts
    if linear.endswith(".attention.qkv"):
        return join_qkv(parts, spec)
    if ".experts." in name and experts is not None and experts.count % len(parts) == 0:
        return torch.cat(parts)
    if linear.endswith(".experts.gate_up") and experts is not None:
        return join_halves(parts, 2 * experts.count)
    if linear.endswith(".gate_up"):
        return join_halves(parts, 2)
    if linear.endswith(".mlp.fc") or linear == "lm_head":
        return torch.cat(parts)
    if spec.qk_norm_per_head and linear.endswith((".q_layernorm", ".k_layernorm")):
        copies = max(1, len(parts) // spec.kv_heads) if linear.endswith(".k_layernorm") else 1
        return torch.cat(parts[::copies])
    if linear.endswith(COLUMNS) and kind == "bias":
        assert not any(part.any() for part in parts[1:])
        return parts[0]
    if linear.endswith(COLUMNS) and parts[0].dim() > 1:
        return torch.cat(parts, dim=1)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("weight_only", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_joined_are_the_whole(engine_of, family, weight_only, ranks):
    folder = engine_of(family, weight_only)
    whole = folder.tensors()
    parts = [rank_tensors(folder, rank, ranks) for rank in range(ranks)]
    for name, tensor in whole.items():
        joined = join(name, [part[name] for part in parts], folder.spec)
        assert joined.dtype == tensor.dtype, name
        assert torch.equal(as_bytes(joined), as_bytes(tensor)), name
    linears = [name for name in whole if name.endswith(".attention.dense.weight")]
    assert all(parts[0][name].numel() * ranks == whole[name].numel() for name in linears)
    assert [set(part) for part in parts] == [set(whole)] * ranks


@pytest.mark.parametrize("weight_only", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_the_logits_of_one(engine_of, family, weight_only):
    folder = engine_of(family, weight_only)
    tokens = [[3, 1, 4, 514, 5, 9, 2, 6], [7]]
    expected = logits_of(folder.spec, folder.tensors(), torch.float32, tokens)

    def run(ranks: ThreadRanks) -> tuple[list[torch.Tensor], int]:
        spec = rank_spec(folder.spec, ranks.size)
        tensors = rank_tensors(folder, ranks.rank, ranks.size)
        return logits_of(spec, tensors, torch.float32, tokens, ranks), ranks.sums

    first, second = on_ranks(2, run)
    for found, other, wanted in zip(first[0], second[0], expected, strict=True):
        assert torch.equal(found, other)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4)
    per_layer = 1 if folder.spec.parallel_residual else 2
    per_layer += folder.spec.qk_norm_kind == "all"  # the squares of queries and keys
    assert first[1] == per_layer * folder.spec.layers * len(tokens)


def test_four_ranks_that_share_kv_heads_normalise_over_all_of_them(tmp_path: Path):
    model = save_rank_model("olmo2", tmp_path / "model", num_key_value_heads=2)
    tensors = load_file(model / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = torch.linspace(0.5, 2.0, len(values))
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    folder = build_rank_engine(model, tmp_path / "engine")
    tokens = [[3, 1, 4, 514, 5, 9, 2, 6]]
    (expected,) = logits_of(folder.spec, folder.tensors(), torch.float32, tokens)

    def run(ranks: ThreadRanks) -> torch.Tensor:
        spec = rank_spec(folder.spec, ranks.size)
        own = rank_tensors(folder, ranks.rank, ranks.size)
        return logits_of(spec, own, torch.float32, tokens, ranks)[0]

    for found in on_ranks(4, run):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


def test_a_tied_head_is_a_view_of_the_embedding(tmp_path: Path):
    model = save_rank_model("llama", tmp_path / "model", tie_word_embeddings=True)
    folder = build_rank_engine(model, tmp_path / "engine")

    def build(ranks: ThreadRanks) -> Transformer:
        tensors = rank_tensors(folder, ranks.rank, ranks.size)
        spec = rank_spec(folder.spec, ranks.size)
        return Transformer(
            spec, tensors, torch.float32, torch.device("cpu"), positions=16, ranks=ranks
        )

    first, second = on_ranks(2, build)
    assert first.head.weight.shape[0] == 258
    assert second.head.weight.shape[0] == 257
    assert second.head.weight.data_ptr() == second.embedding[258:].data_ptr()


def test_the_vocabulary_is_divided_into_aligned_parts():
    large = replace(LLAMA, vocab_size=128256)
    parts = [large.vocabulary_of(rank, 8) for rank in range(8)]
    assert [len(part) for part in parts] == [16064] * 7 + [15808]
    assert [token for part in parts for token in part] == list(range(128256))
    small = [LLAMA.vocabulary_of(rank, 4) for rank in range(4)]
    assert [len(part) for part in small] == [129, 129, 129, 128]


@pytest.mark.parametrize(
    ("changes", "quantisation", "ranks", "problem"),
    [
        ({}, Quantisation(), 0, "tp_size must be at least 1, not 0"),
        ({}, Quantisation(), 3, "tp_size 3 does not divide this model: it has 8 heads"),
        (
            {"heads": 12, "kv_heads": 4},
            Quantisation(),
            6,
            "tp_size 6 does not divide this model: it has 4 KV heads",
        ),
        (
            {"ffn_size": 98},
            Quantisation(),
            4,
            "tp_size 4 does not divide this model: it has 98 feed-forward columns",
        ),
        (
            {},
            Quantisation("W4A16", 32),
            2,
            "tp_size 2 does not divide this model: a rank would have 48 columns of int4 weights, "
            "whose groups have 32",
        ),
        (
            {"vocab_size": 5},
            Quantisation(),
            4,
            "tp_size 4 does not divide this model: it has a vocabulary of 5",
        ),
        (
            {"experts": Experts(6, 2, 34, shared_ffn_size=64)},
            Quantisation(),
            4,
            "tp_size 4 does not divide this model: it has 34 feed-forward columns",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(
    changes, quantisation, ranks, problem
):
    with pytest.raises(ValueError) as error:
        check_ranks(replace(LLAMA, **changes), quantisation, ranks)
    text, _, possible = str(error.value).partition("; possible numbers of ranks: ")
    assert text == problem
    for count in map(int, filter(None, possible.split(", "))):
        check_ranks(replace(LLAMA, **changes), quantisation, count)


def test_whole_experts_need_no_division_of_their_columns():
    check_ranks(replace(LLAMA, experts=Experts(6, 2, 33)), Quantisation(), 2)
    spec = rank_spec(replace(LLAMA, experts=Experts(6, 2, 33)), 2)
    assert spec.experts is not None
    assert spec.experts.ffn_size == 33


def test_the_largest_possible_number_of_ranks():
    assert possible_ranks(LLAMA, Quantisation(), 1) == 1
    assert possible_ranks(LLAMA, Quantisation(), 3) == 2
    assert possible_ranks(LLAMA, Quantisation(), 100) == 8
    assert possible_ranks(LLAMA, Quantisation("W4A16", 32), 8) == 1


def test_one_rank_has_the_whole_spec():
    assert rank_spec(LLAMA, 1) is LLAMA
    assert rank_spec(LLAMA, 8).kv_heads == 1
