"""Fused GEMV, residual addition and norm of a single token: the same logits as the plain path.

tests/kernels compares the GPU kernels with torch references. Here a torch version of the kernels
shows which layers fuse.
"""

import numpy as np
import pytest
import torch
from tiny_models import config_of, engine_tensors, random_model

from slipstream.kernels import linear_dispatch
from slipstream.kernels.attention import plan_attention
from slipstream.kernels.inputs import Unscaled, plain
from slipstream.kernels.linear import Linear, OneDnnLinear
from slipstream.kernels.options import KernelOptions
from slipstream.model.transformer import Step, Transformer

BLOCK, PROMPT = 16, 5
# Fused kernels per layer in a step of one token: two, unless norms or experts are in between.
FAMILIES = {
    "llama": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma": 2,
    "gemma2": 0,
    "gpt2": 0,
    "opt": 0,
    "gptj": 0,
    "mixtral": 0,
}


class FusingLinear(Linear):
    """A linear layer with its fused form, in torch."""

    accepts_unscaled = True
    fuses_residual_norm = True

    def __init__(self, weight, bias, fused_calls):
        self.weight = weight
        self.bias = bias
        self.fused_calls = fused_calls

    def __call__(self, x):
        return torch.nn.functional.linear(plain(x), self.weight, self.bias)

    def residual_norm(self, x, hidden, norm):
        assert len(x) == 1
        self.fused_calls.append(self)
        hidden += self(x).float()
        parts = torch.stack([part.square().sum() for part in hidden.split(10, dim=1)])
        return Unscaled((hidden * norm.weight).to(norm.result), parts, norm.epsilon)


class Doubling:
    """Adapters of all tokens that double a layer's output."""

    def add(self, y, x, layer, linear):
        y += y


def run(spec, tensors, adapters, options=KernelOptions()):
    """Return the logits of a prompt's last token and of the token behind it."""
    cpu = torch.device("cpu")
    model = Transformer(spec, dict(tensors), torch.bfloat16, cpu, 64, options=options)
    cache, logits = model.new_cache(2 * BLOCK), []
    for begin, count in ((0, PROMPT), (PROMPT, 1)):
        places = torch.arange(begin, begin + count)
        attention = plan_attention(
            np.array([[1]]), np.array([begin]), np.array([count]), BLOCK, cache
        )
        step = Step(
            places + 7, places, places + BLOCK, attention, torch.tensor([count - 1]), adapters
        )
        with torch.inference_mode():
            logits.append(model(step, cache))
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapters", [None, Doubling()], ids=["alone", "with adapters"])
def test_fused_and_plain_path_give_the_same_logits(family, adapters, monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of(family)))
    fused_calls = []
    monkeypatch.setattr(OneDnnLinear, "supports", lambda weight: False)
    expected = run(spec, tensors, adapters)
    monkeypatch.setattr(
        linear_dispatch, "unquantised", lambda weight, bias: FusingLinear(weight, bias, fused_calls)
    )
    got = run(spec, tensors, adapters)
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < 0.02, error
    # The prompt's step fuses, too, in the last layer: only one of its tokens is sampled.
    assert len(fused_calls) == (0 if adapters else FAMILIES[family] * (spec.layers + 1))


def test_fused_gemv_off_takes_the_plain_kernels(monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of("llama")))
    fused_calls = []
    monkeypatch.setattr(
        linear_dispatch, "unquantised", lambda weight, bias: FusingLinear(weight, bias, fused_calls)
    )
    fused = run(spec, tensors, None)
    assert len(fused_calls) == 2 * (spec.layers + 1)
    fused_calls.clear()
    plain_path = run(spec, tensors, None, KernelOptions(fused_gemv=False))
    assert not fused_calls
    assert (fused - plain_path).abs().max() / plain_path.abs().max() < 0.02
