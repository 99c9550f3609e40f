from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import as_tensor, plain_tokenizer, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from run_engine import logits_of
from tiny_models import VOCABULARY, config_of, expected_tensors, random_model

from slipstream.model.families.family import UnsupportedModel
from slipstream.model.spec import RopeScaling
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import GenerationDefaults, PoolingDefaults
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.sources import source as source_module
from slipstream.weights.sources.gguf_file import read_gguf
from slipstream.weights.sources.gguf_source import GgufSource
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.source import SourceError

TOKENIZER = plain_tokenizer(VOCABULARY)


def build_tensors(path: Path) -> dict[str, torch.Tensor]:
    return read_engine_folder(build_engine(path, path.parent / "engine", dtype="float32")).tensors()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gpt2", {}),
    ],
)
def test_a_gguf_file_gives_the_same_engine_as_its_model(
    tmp_path: Path, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # several blocks per tensor, each with complete heads
    monkeypatch.setattr(source_module, "BLOCK_BYTES", 5000)
    model = random_model(config_of(family, **options))
    write_gguf(tmp_path / "model.gguf", model, metadata=TOKENIZER)
    found, expected = build_tensors(tmp_path / "model.gguf"), expected_tensors(model)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_the_spec_equals_that_of_the_hugging_face_folder(tmp_path: Path, family: str) -> None:
    model = random_model(config_of(family))
    model.save_pretrained(tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", model, metadata=TOKENIZER)
    expected = HuggingFaceFolder(tmp_path / "hf", "hf").spec
    found = GgufSource(tmp_path / "model.gguf", "gguf").spec
    assert found.norm_epsilon == pytest.approx(expected.norm_epsilon, rel=1e-6)
    assert {**found.to_config(), "norm_epsilon": 0} == {**expected.to_config(), "norm_epsilon": 0}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma", {}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None}),
        ("phi3", {"sliding_window": 24}),
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("falcon", {}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        ),
        ("gpt_neox", {}),
        ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
        ("gptj", {}),
        (
            "phi3",
            {
                "rope_parameters": LONGROPE,
                "max_position_embeddings": 160,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_a_file_of_another_family_computes_what_transformers_does(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    model = random_model(config_of(family, **options)).eval()
    factors = {
        f"rope_factors_{length}.weight": np.array(LONGROPE[f"{length}_factor"], np.float32)
        for length in ("short", "long")
        if options.get("rope_parameters")
    }
    write_gguf(tmp_path / "model.gguf", model, metadata=TOKENIZER, extra=factors)
    engine = read_engine_folder(
        build_engine(tmp_path / "model.gguf", tmp_path / "engine", dtype="float32")
    )
    model.save_pretrained(tmp_path / "hf")
    expected = HuggingFaceFolder(tmp_path / "hf", "hf").spec
    assert engine.spec.max_positions == expected.max_positions
    assert (engine.spec.norm_offset, expected.norm_offset) == (
        0.0,
        1.0 if "gemma" in family else 0.0,
    )
    assert engine.spec.experts == expected.experts
    sequence = torch.randint(0, VOCABULARY, (77,), generator=torch.Generator().manual_seed(3))
    ours = logits_of(engine.spec, engine.tensors(), torch.float32, [sequence.tolist()])[0]
    with torch.inference_mode():
        assert (ours - model(sequence[None]).logits[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
)
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: Kind) -> None:
    model = random_model(config_of("qwen2"))
    stored = write_gguf(tmp_path / "model.gguf", model, kind, metadata=TOKENIZER)
    found = build_tensors(tmp_path / "model.gguf")
    layer = "transformer.layers.1."
    assert torch.equal(
        found["transformer.vocab_embedding.weight"], as_tensor(stored["token_embd.weight"])
    )
    assert torch.equal(found[layer + "mlp.proj.weight"], as_tensor(stored["blk.1.ffn_down.weight"]))
    joined = np.concatenate([stored[f"blk.1.attn_{part}.weight"] for part in "qkv"])
    assert torch.equal(found[layer + "attention.qkv.weight"], as_tensor(joined))
    original = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert (found[layer + "mlp.proj.weight"] - original).norm() < 0.12 * original.norm()


def test_q4_1_follows_the_definition_of_the_format(tmp_path: Path) -> None:
    """A block: scale and minimum as half floats, then 16 bytes; value i is in the low nibble of
    byte i for i < 16, in the high nibble of byte i - 16 after that.
    """
    model = random_model(config_of("qwen2"))
    write_gguf(tmp_path / "model.gguf", model, Kind.Q4_1, metadata=TOKENIZER)
    file = read_gguf(tmp_path / "model.gguf")
    block = file.read_raw_rows("token_embd.weight", 3, 4)[0, :20].tobytes()
    scale, minimum = np.frombuffer(block[:4], np.float16).astype(np.float32)
    levels = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    found = build_tensors(tmp_path / "model.gguf")["transformer.vocab_embedding.weight"][3, :32]
    assert torch.equal(found, torch.tensor([scale * level + minimum for level in levels]))


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_dequantised(tmp_path: Path, kind: Kind) -> None:
    """The package cannot write these types. Any bytes with finite half floats are a valid tensor."""
    path = tmp_path / "model.gguf"
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(
        0, 60, (VOCABULARY, 256 // values * size), dtype=np.uint8
    )
    stored = write_gguf(
        path,
        random_model(config_of("qwen2", hidden_size=256)),
        metadata=TOKENIZER,
        packed={"token_embd.weight": (blocks, kind)},
    )
    expected = stored["token_embd.weight"]
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 100
    assert torch.equal(
        build_tensors(path)["transformer.vocab_embedding.weight"], as_tensor(expected)
    )


def test_rope_freqs_become_longrope_factors(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    model = random_model(config_of("llama"))
    write_gguf(
        tmp_path / "model.gguf", model, extra={"rope_freqs.weight": divisors}, metadata=TOKENIZER
    )
    source = GgufSource(tmp_path / "model.gguf", "gguf")
    listed = tuple(divisors.tolist())
    assert source.spec.rope_scaling == RopeScaling(
        "longrope", 1.0, 128, attention_factor=1.0, short_factors=listed, long_factors=listed
    )
    assert "rope_freqs.weight" not in source.shapes()


@pytest.mark.parametrize(
    ("metadata", "scaling", "positions"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeScaling("linear", 4.0, 128),
            512,
        ),
        ({"llama.rope.scale_linear": 2.0}, RopeScaling("linear", 2.0, 128), 256),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            RopeScaling("yarn", 4.0, 32),
            128,
        ),
        ({"llama.rope.scaling.type": "none"}, None, 128),
    ],
)
def test_rope_scaling_is_read_from_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], scaling: RopeScaling | None, positions: int
) -> None:
    write_gguf(
        tmp_path / "model.gguf",
        random_model(config_of("llama")),
        metadata={**TOKENIZER, **metadata},
    )
    spec = GgufSource(tmp_path / "model.gguf", "gguf").spec
    assert (spec.rope_scaling, spec.max_positions) == (scaling, positions)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.ggml.eos_token_id": 5}, GenerationDefaults((5,))),
        (
            {
                "tokenizer.ggml.eot_token_id": 6,
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.padding_token_id": 0,
            },
            GenerationDefaults((5, 6), 1, 0),
        ),
        ({"tokenizer.ggml.eot_token_id": 5}, GenerationDefaults((5,))),
        ({"tokenizer.ggml.tokens": ["a", "<|eot_id|>"]}, GenerationDefaults((5, 1))),
    ],
)
def test_special_tokens_are_read(
    tmp_path: Path, metadata: dict[str, Any], expected: GenerationDefaults
) -> None:
    write_gguf(
        tmp_path / "model.gguf",
        random_model(config_of("llama")),
        metadata={**TOKENIZER, **metadata},
    )
    assert GgufSource(tmp_path / "model.gguf", "gguf").generation == expected


@pytest.mark.parametrize(
    ("number", "kind"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None)]
)
def test_the_pooling_type_is_read(tmp_path: Path, number: int | None, kind: str | None) -> None:
    metadata = {} if number is None else {"llama.pooling_type": number}
    write_gguf(
        tmp_path / "model.gguf",
        random_model(config_of("llama")),
        metadata={**TOKENIZER, **metadata},
    )
    found = GgufSource(tmp_path / "model.gguf", "gguf").pooling
    assert found == (None if kind is None else PoolingDefaults(kind))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (
            {"llama.expert_count": 8},
            SourceError,
            r"MixtralForCausalLM: tensors missing blk\.N\.ffn_down_exps\.N\.weight",
        ),
        ({"split.count": 3}, SourceError, "one of several parts"),
        ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedModel, "differs between layers"),
        ({"llama.attention.head_count": 5}, SourceError, "contradicts itself: heads"),
        (
            {"llama.block_count": 4_000_000_000},
            SourceError,
            "4000000000 layers, the weights are only 21 tensors",
        ),
    ],
)
def test_unsupported_files_are_refused(
    tmp_path: Path, metadata: Any, error: Any, message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(config_of("llama")), metadata=metadata)
    with pytest.raises(error, match=message):
        source_module.check_source(GgufSource(path, "gguf"))


def test_unsupported_architecture_names_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    for name in ("token_embd.weight", "blk.0.ssm_in.weight", "blk.1.ssm_in.weight"):
        writer.add_tensor(name, np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModel,
        match=r"mamba is not supported; supported: llama, qwen2, qwen3, gpt2, gemma, "
        r"gemma2, gemma3, phi3, qwen3moe, falcon, gptneox, gptj; tensors that "
        r"match no known name: blk\.N\.ssm_in\.weight$",
    ):
        GgufSource(path, "gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, random_model(config_of("llama", num_hidden_layers=1)), metadata=TOKENIZER)
    return path


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, "not a GGUF"),
        (3, "not a GGUF"),
        (12, "cut short"),
        (500, "cut short"),
        (-1, "cut short: tensor .* ends at byte"),
    ],
)
def test_files_that_are_cut_short_are_refused(
    tmp_path: Path, small_file: Path, keep: int, message: str
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file.read_bytes()[:keep])
    with pytest.raises(SourceError, match=message):
        GgufSource(path, "gguf")


def test_arrays_of_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    array, one = struct.pack("<I", 9), struct.pack("<Q", 1)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + one + b"k"
    path.write_bytes(header + array + (array + one) * 50_000)
    with pytest.raises(SourceError, match="damaged in its header"):
        GgufSource(path, "gguf")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))
    with pytest.raises(SourceError, match="its header has 1152921504606846976 tensors"):
        GgufSource(path, "gguf")


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _one_tensor(name: str, dims: tuple[int, ...], data_bytes: int = 0) -> bytes:
    """Return a file of Qwen3's experts with one tensor of one byte per element."""
    tensor = _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 24, 0)
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 1)
        + _text("general.architecture")
        + struct.pack("<I", 8)
        + _text("qwen3moe")
        + tensor
        + bytes(32 + data_bytes)
    )


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((32, 0, 2**40), "blk.0.ffn_gate_exps.weight has a dimension of 0"),
        ((0, 1, 1), "blk.0.ffn_gate_exps.weight has a dimension of 0"),
        ((1, 1, 5000), "blk.0.ffn_gate_exps.weight has 5000 experts; models have at most 4096"),
    ],
)
def test_experts_without_end_are_refused(
    tmp_path: Path, dims: tuple[int, ...], message: str
) -> None:
    path = tmp_path / "experts.gguf"
    path.write_bytes(_one_tensor("blk.0.ffn_gate_exps.weight", dims, 5000))
    with pytest.raises(SourceError, match=message):
        GgufSource(path, "gguf")


@pytest.mark.parametrize("alignment", [0, -32, 2**30])
def test_an_alignment_that_is_none_is_refused(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "alignment.gguf"
    entry = _text("general.alignment") + struct.pack("<Ii", 5, alignment)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(SourceError, match="damaged in its header"):
        GgufSource(path, "gguf")


def test_metadata_with_millions_of_texts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.gguf"
    count = 1_600_000
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("k") + struct.pack("<IIQ", 9, 8, count)
    path.write_bytes(header + bytes(8 * count))
    with pytest.raises(SourceError, match="damaged in its header"):
        GgufSource(path, "gguf")


def test_old_versions_and_big_endian_are_refused(tmp_path: Path, small_file: Path) -> None:
    content = small_file.read_bytes()
    for version in (b"\x01\0\0\0", b"\0\0\0\x03"):
        path = tmp_path / "old.gguf"
        path.write_bytes(content[:4] + version + content[8:])
        with pytest.raises(SourceError, match="GGUF version"):
            GgufSource(path, "gguf")


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(4, 3000), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_mutated_header_is_read_or_refused_without_another_error(
    small_file: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(small_file.read_bytes())
    for place, value in changes:
        content[place] = value
    path = small_file.with_name("mutated.gguf")
    path.write_bytes(content)
    with contextlib.suppress(SourceError, UnsupportedModel):  # anything else fails the test
        source_module.check_source(GgufSource(path, "gguf"))
