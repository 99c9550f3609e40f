"""An engine in a process of its own generates the same tokens as one in this process."""

import asyncio
import json

import pytest
import torch
from safetensors.torch import save_file
from submit import submit

from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.server.engine_link.client import EngineClient, EngineStartFailed
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.weights.build import build_engine
from slipstream.weights.load import start_engine

VOCABULARY = 96
HIDDEN = 32
FFN = 48
LAYERS = 2
HEADS = 4
SETTINGS = EngineSettings(dtype="float32", device="cpu", cache_tokens=1024, max_rows=8, threads=1)


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    """Build an engine of a random Llama."""
    source = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    (source / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        place = f"model.layers.{layer}."
        shapes |= {
            place + "input_layernorm.weight": (HIDDEN,),
            place + "post_attention_layernorm.weight": (HIDDEN,),
            place + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            place + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            place + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
            place + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            place + "mlp.gate_proj.weight": (FFN, HIDDEN),
            place + "mlp.up_proj.weight": (FFN, HIDDEN),
            place + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    save_file(
        {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()},
        source / "model.safetensors",
    )
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(VOCABULARY)}, "unk_token": "0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": words,
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    return build_engine(source, tmp_path_factory.mktemp("engines") / "tiny", dtype="float32")


async def generate_all(engine):
    prompts = [[5, 6, 7], [9], list(range(2, 60))]
    params = [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=25, temperature=0.8, seed=11, log_probs=True),
    ]
    generations = [submit(engine, prompt, sampling) for prompt in prompts for sampling in params]

    async def collect(generation):
        tokens = []
        log_probs = []
        async for delta in generation:
            tokens += delta.tokens
            log_probs += delta.log_probs or []
        return tokens, log_probs, delta.finish_reason

    async with asyncio.timeout(60):
        return await asyncio.gather(*map(collect, generations))


async def test_engine_process_and_in_process_engine_generate_the_same_tokens(engine_folder):
    inside = InProcessEngine(start_engine(engine_folder, SETTINGS))
    outside = EngineClient(engine_folder, SETTINGS)
    try:
        async with asyncio.timeout(60):
            await outside.start()
        expected = await generate_all(inside)
        found = await generate_all(outside)
        assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in expected]
        for (_, log_probs, _), (_, wanted, _) in zip(found, expected, strict=True):
            # the requests of a step may differ between the two engines
            assert log_probs == pytest.approx(wanted, abs=1e-4)
        assert all(finish == "length" for _, _, finish in expected + found)
        assert [len(tokens) for tokens, _, _ in expected] == [40, 25] * 3
        assert [len(log_probs) for _, log_probs, _ in expected] == [0, 25] * 3
        assert (outside.info.vocab_size, outside.info.dtype) == (VOCABULARY, "float32")
    finally:
        inside.close()
        await outside.stop()


async def test_damaged_engine_file_is_refused_without_a_traceback(engine_folder, tmp_path, capfd):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((engine_folder / "config.json").read_bytes())
    weights = (engine_folder / "rank0.engine").read_bytes()
    (broken / "rank0.engine").write_bytes(weights[: len(weights) // 2])
    engine = EngineClient(broken, SETTINGS)
    with pytest.raises(EngineStartFailed, match=r"rank0\.engine"):
        async with asyncio.timeout(60):
            await engine.start()
    await engine.stop()
    assert "Traceback" not in capfd.readouterr().err
