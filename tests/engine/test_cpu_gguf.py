"""Engines of GGUF files on compiled code in bfloat16: the blocks stay packed, and logits are those
of the expanded weights within the rounding of activations.
"""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import gguf_tensors, plain_tokenizer, write_gguf
from run_engine import engine, logits_of
from tiny_models import VOCABULARY, config_of, random_model

from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.blocks import BLOCK_FORMATS
from slipstream.weights import load
from slipstream.weights.build import build_engine
from slipstream.weights.engine_folder import read_engine_folder

SEQUENCE = list(range(3, 48))
SIZES = {"hidden_size": 256, "intermediate_size": 256}
# format → its float16 factors, in 16-bit numbers from the begin of a block; the packed format
FORMATS = {
    "Q4_0": ([0], "INT4"),
    "Q4_1": ([0, 1], "INT4"),
    "Q5_0": ([0], "INT8"),
    "Q5_1": ([0, 1], "INT8_OFFSET"),
    "Q8_0": ([0], "INT8"),
    "Q2_K": ([40, 41], "INT4_HALVES"),
    "Q3_K": ([54], "INT4_HALVES"),
    "Q4_K": ([0, 1], "INT4"),
    "Q5_K": ([0, 1], "INT8_OFFSET"),
    "Q6_K": ([104], "INT8_HALVES"),
    "IQ4_NL": ([0], "INT8"),
    "IQ4_XS": ([0], "INT8"),
}


def random_blocks(name, rows, columns, chance):
    """Return random blocks, whose weights are about as large as those of a random model."""
    found = BLOCK_FORMATS[name]
    raw = chance.integers(0, 256, (rows, columns // found.weights * found.nbytes), dtype=np.uint8)
    halves = raw.reshape(-1, found.nbytes // 2, 2).view(np.float16)[..., 0]
    halves[:, FORMATS[name][0]] = 1.0
    halves[:, FORMATS[name][0]] = 0.06 / found.expand(raw).std()
    return raw


def build_both(place, name, tied):
    """Return the folder of an engine that keeps random blocks, and the same in float32."""
    model = random_model(config_of("llama", tie_word_embeddings=tied, **SIZES))
    chance = np.random.default_rng(0)
    packed = {
        tensor: (random_blocks(name, *array.shape, chance), Kind[name])
        for tensor, array in gguf_tensors(model).items()
        if array.ndim == 2
    }
    file = place / "model.gguf"
    write_gguf(file, model, packed=packed, metadata=plain_tokenizer(VOCABULARY))
    kept = build_engine(file, place / "kept", dtype="auto")
    return kept, read_engine_folder(build_engine(file, place / "plain", dtype="float32"))


def build_experts(place, name, family):
    """Return the folder of an engine of a mixture of experts that keeps random blocks."""
    own = {"moe_intermediate_size": 256, "head_dim": 64} if family == "qwen3_moe" else {}
    model = random_model(config_of(family, **SIZES, **own))
    chance = np.random.default_rng(0)
    packed = {}
    for tensor, array in gguf_tensors(model).items():
        if array.ndim > 1 and "ffn_gate_inp" not in tensor:
            rows = random_blocks(name, array.size // array.shape[-1], array.shape[-1], chance)
            packed[tensor] = (rows.reshape(*array.shape[:-1], -1), Kind[name])
    file = place / "model.gguf"
    write_gguf(file, model, packed=packed, metadata=plain_tokenizer(VOCABULARY))
    kept = build_engine(file, place / "kept", dtype="auto")
    return kept, read_engine_folder(build_engine(file, place / "plain", dtype="float32"))


def context_logits(loop):
    params = SamplingParams(max_tokens=1, context_logits=True)
    loop.submit(GenerateRequest(0, SEQUENCE, params))
    found = []
    while loop.has_work():
        outputs = loop.step()
        for scores in outputs.scores.values() if outputs is not None else ():
            found.append(np.frombuffer(scores.context_logits, dtype=np.float32))
    return np.concatenate(found).reshape(len(SEQUENCE), -1)


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in FORMATS), ("Q4_1", True), ("Q6_K", True)]
)
def test_blocks_stay_packed_and_logits_are_those_of_the_file(tmp_path, name, tied):
    kept, plain = build_both(tmp_path, name, tied)
    [expected] = logits_of(plain.spec, plain.tensors(), torch.float32, [SEQUENCE])
    expected = expected.numpy()

    def distance(**settings):
        loop = engine(kept, dtype="bfloat16", threads=2, **settings)
        assert isinstance(loop.runner, CpuRunner)
        model = loop.runner.model
        assert model.embedding.format.name == FORMATS[name][1]
        parts = [model.head.parts, model.layers[0].up.parts, model.layers[1].qkv.parts]
        assert {part.format.name for each in parts for part in each} == {FORMATS[name][1]}
        return np.abs(context_logits(loop) - expected).mean() / expected.std()

    exact = distance(exact_activations=True)
    assert exact < 0.01
    assert exact < distance() < 0.03


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks_of_experts_stay_packed(tmp_path, name, family):
    kept, plain = build_experts(tmp_path, name, family)
    [expected] = logits_of(plain.spec, plain.tensors(), torch.float32, [SEQUENCE])
    expected = expected.numpy()

    def distance(dtype, **settings):
        loop = engine(kept, dtype=dtype, threads=2, **settings)
        assert isinstance(loop.runner, CpuRunner)
        mixture = loop.runner.model.layers[1].mixture
        kinds = {part.format.name for part in (*mixture.up.experts, *mixture.down.experts)}
        assert kinds == {"F32" if dtype == "float32" else FORMATS[name][1]}
        return np.abs(context_logits(loop) - expected)

    assert distance("float32").max() < 1e-4
    # a routing weight that is nearly that of another expert may choose the other one
    exact = np.median(distance("bfloat16", exact_activations=True)) / expected.std()
    assert exact < 0.01
    assert exact < np.median(distance("bfloat16")) / expected.std() < 0.03


def test_untied_embeddings_are_in_the_packed_file(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_PACKED_FROM_BYTES", 0)
    kept, _ = build_both(tmp_path, "Q4_0", tied=False)
    first = engine(kept, dtype="bfloat16").runner.model.embedding.kept
    second = engine(kept, dtype="bfloat16").runner.model.embedding.kept
    assert np.array_equal(first.data, second.data)
    assert not second.data.flags.writeable  # it is the file
    assert second.data.nbytes < 0.4 * 2 * VOCABULARY * SIZES["hidden_size"]
    # the rows of another format than the run's are not kept twice in memory
    in_float32 = engine(kept, dtype="float32").runner.model.embedding
    assert in_float32.format.name == "F32"


def test_the_formats_of_the_test_are_all_formats():
    assert set(FORMATS) == set(BLOCK_FORMATS)
    assert all(hasattr(gguf.GGMLQuantizationType, name) for name in FORMATS)
