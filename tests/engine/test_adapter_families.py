"""Adapters of families whose weights have another layout than Llama's give the tokens of merged
weights.
"""

import pytest
import torch
from run_engine import engine, greedy_choices, run_all
from tiny_adapters import save_adapter
from tiny_models import VOCABULARY, config_of, positions_of, random_model

from slipstream.engine.adapters.cache import AdapterSource
from slipstream.engine.cpu.runner import CpuRunner
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.weights.build import build_engine

MODULES = {
    "gemma3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    # families whose q and k rows the engine reorders
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "opt": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "olmo2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def strong_model(family: str):
    """Set norms near 1, so that attention concentrates on single tokens, and wrong queries show."""
    model = random_model(config_of(family, **positions_of(family, 256)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name or "ln_" in name) and name.endswith("weight") and family != "gemma3":
                parameter.add_(1.0)
    return model.eval()


@pytest.mark.parametrize("family", MODULES)
def test_adapter_output_equals_merged_weights(tmp_path, family):
    model = strong_model(family)
    model.save_pretrained(tmp_path / "hf")
    folder = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="float32")
    merged = save_adapter(model, tmp_path / "adapter", modules=MODULES[family])
    generator = torch.Generator().manual_seed(5)
    asked = [
        torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 20, 45, 45)
    ]
    source = AdapterSource(folder=str(tmp_path / "adapter"))
    loop = engine(folder)
    assert isinstance(loop.runner, CpuRunner)
    answers = run_all(
        loop,
        [
            GenerateRequest(
                number,
                prompt,
                SamplingParams(max_tokens=32),
                adapter=number % 2,
                adapter_name="one",
                adapter_source=source if number % 2 else None,
            )
            for number, prompt in enumerate(asked)
        ],
    )
    for number, prompt in enumerate(asked):
        choices = greedy_choices(merged if number % 2 else model, [prompt + answers[number]])[0]
        assert answers[number] == choices[len(prompt) - 1 : -1]
