"""Engines that keep the blocks of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import plain_tokenizer, write_gguf
from run_engine import engine, generate, logits_of
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.kernels.blocks import BlockMatrix
from slipstream.kernels.stored import StoredArray, to_float32
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineFolderError, read_engine_config
from slipstream.weights.engine_folder import EngineFolder, read_engine_folder
from slipstream.weights.parameters import StoredRows
from slipstream.weights.shards import rank_tensors, rank_weights

TOKENIZER = plain_tokenizer(VOCABULARY)
QKV = "transformer.layers.1.attention.qkv.weight"


def build_both(
    place: Path, family: str, kind: Kind = Kind.Q4_1, mixed: bool = True, **options: Any
) -> tuple[EngineFolder, EngineFolder]:
    """Return an engine that keeps a file's blocks, and one of the same file in float32."""
    model = random_model(config_of(family, **options))
    packed = {}
    if mixed:  # the values of the second layer are stored in another format
        name = next(name for name in ("attn_v", "attn_qkv") if stores(family, name))
        rows = np.random.default_rng(1).standard_normal(shape_of(model, name)).astype(np.float32)
        packed[f"blk.1.{name}.weight"] = (gguf.quants.quantize(rows / 8, Kind.Q8_0), Kind.Q8_0)
    write_gguf(place / "model.gguf", model, kind, metadata=TOKENIZER, packed=packed)
    kept = build_engine(place / "model.gguf", place / "kept", dtype="auto")
    plain = build_engine(place / "model.gguf", place / "plain", dtype="float32")
    return read_engine_folder(kept), read_engine_folder(plain)


def stores(family: str, name: str) -> bool:
    fused = family in ("gpt2", "phi3", "gpt_neox", "falcon")
    return (name == "attn_qkv") == fused


def shape_of(model: Any, name: str) -> tuple[int, ...]:
    from gguf_files import gguf_tensors

    return gguf_tensors(model)[f"blk.1.{name}.weight"].shape


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("gptj", {}),
        ("phi3", {}),
        ("gpt2", {}),
        ("mixtral", {}),
    ],
)
def test_the_weights_are_those_of_the_expanded_engine(tmp_path, family, options):
    kept, plain = build_both(tmp_path, family, **options)
    assert kept.quantisation.algorithm == "GGUF"
    found = kept.tensors(dtype=torch.float32)
    expected = plain.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor), name
    stored = [one for one in kept.weights().values() if isinstance(one, BlockMatrix)]
    assert len(stored) > 8
    assert sum(one.nbytes for one in stored) < sum(4 * np.prod(one.shape) for one in stored) / 5


def test_a_fused_matrix_keeps_the_format_of_each_part(tmp_path):
    kept, _ = build_both(tmp_path, "qwen2")
    spec = kept.spec
    rows = spec.q_size + spec.kv_size
    assert kept.quantisation.stored[QKV] == (
        StoredRows("Q4_1", rows),
        StoredRows("Q8_0", spec.kv_size),
    )
    other = QKV.replace(".1.", ".0.")
    assert kept.quantisation.stored[other] == (StoredRows("Q4_1", spec.qkv_size),)
    weights = kept.weights()
    assert [part.format.name for part in weights[QKV].parts] == ["Q4_1", "Q8_0"]
    norm = weights["transformer.ln_f.weight"]
    assert isinstance(norm, StoredArray)
    assert (norm.code, norm.array.flags.owndata) == ("F32", False)


def test_the_config_describes_the_folder(tmp_path):
    kept, plain = build_both(tmp_path, "llama")
    formats = [
        json.loads((folder.path / "config.json").read_text())["slipstream"]["format"]
        for folder in (kept, plain)
    ]
    assert formats == [2, 1]
    assert read_engine_config(kept.path).quantisation == kept.quantisation
    assert kept.quantisation.bits == 4
    sizes = [(folder.path / "rank0.engine").stat().st_size for folder in (kept, plain)]
    assert sizes[0] < sizes[1] / 4
    before = (kept.path / "rank0.engine").stat().st_mtime_ns
    build_engine(tmp_path / "model.gguf", kept.path, dtype="auto")
    assert (kept.path / "rank0.engine").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[0].__setitem__(0, "Q9_9"), "the form 'Q9_9' is not known"),
        (lambda parts: parts.clear(), "are not one matrix"),
        (lambda parts: parts[0].__setitem__(1, 7), "its parts .* are not 128 rows"),
        (lambda parts: parts[0].__setitem__(0, "Q8_0"), "has another shape or type for"),
        (lambda parts: parts[0].__setitem__(0, "Q4_K"), "64 columns are not whole blocks of 256"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(tmp_path, change, message):
    kept, _ = build_both(tmp_path, "llama", mixed=False)
    path = kept.path / "config.json"
    config = json.loads(path.read_text())
    change(config["pretrained_config"]["quantization"]["stored"][QKV])
    path.write_text(json.dumps(config))
    with pytest.raises(EngineFolderError, match=message):
        read_engine_folder(kept.path)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "auto", "weight_only": "int8"}]
)
def test_a_type_or_a_precision_expands_the_blocks(tmp_path, options):
    build_both(tmp_path, "llama")
    folder = read_engine_folder(
        build_engine(tmp_path / "model.gguf", tmp_path / "other", **options)
    )
    assert not folder.quantisation.stored
    assert not any(isinstance(one, BlockMatrix) for one in folder.weights().values())


def test_a_file_without_blocks_is_a_plain_engine(tmp_path):
    model = random_model(config_of("llama"))
    write_gguf(tmp_path / "model.gguf", model, Kind.F16, metadata=TOKENIZER)
    found = read_engine_config(build_engine(tmp_path / "model.gguf", tmp_path / "e", dtype="auto"))
    assert (found.dtype, found.quantisation.algorithm) == ("float16", None)


def test_plain_matrices_beside_blocks_keep_their_type(tmp_path):
    model = random_model(config_of("llama"))
    embedding = model.state_dict()["model.embed_tokens.weight"].numpy().astype(np.float16)
    packed = {
        "token_embd.weight": (embedding, Kind.F16),
        "blk.0.attn_k.weight": (
            np.zeros(shape_of(model, "attn_k"), np.float32),
            Kind.F32,
        ),
    }
    write_gguf(tmp_path / "model.gguf", model, Kind.Q4_0, metadata=TOKENIZER, packed=packed)
    folder = read_engine_folder(
        build_engine(tmp_path / "model.gguf", tmp_path / "engine", dtype="auto")
    )
    weights = folder.weights()
    assert weights["transformer.vocab_embedding.weight"].code == "F16"
    # part of a fused matrix: blocks and numbers cannot be one matrix
    assert weights[QKV.replace(".1.", ".0.")].code == "BF16"
    assert isinstance(weights[QKV], BlockMatrix)


def test_the_engine_answers_as_the_expanded_one(tmp_path):
    kept, plain = build_both(tmp_path, "llama")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    expected = generate(engine(plain.path), prompts, max_tokens=12)
    assert generate(engine(kept.path), prompts, max_tokens=12) == expected
    logits = logits_of(kept.spec, kept.tensors(dtype=torch.float32), torch.float32, prompts)
    wanted = logits_of(plain.spec, plain.tensors(), torch.float32, prompts)
    assert all(torch.equal(found, one) for found, one in zip(logits, wanted, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_their_rows_and_columns_out_of_the_blocks(tmp_path, ranks):
    kept, plain = build_both(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=4)
    for rank in range(ranks):
        found = rank_tensors(kept, rank, ranks, torch.float32)
        expected = rank_tensors(plain, rank, ranks)
        stored = rank_weights(kept, rank, ranks)  # what compiled code takes
        assert stored.keys() == expected.keys()
        for name, weight in stored.items():
            np.testing.assert_array_equal(to_float32(weight), expected[name].float().numpy())
        for name, tensor in expected.items():
            assert torch.equal(found[name].float(), tensor), name
