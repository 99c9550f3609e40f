"""Where a product joins the residual stream, a single token comes out as it does where each part is
done by itself.

The kernels that do it are a GPU's and have twins of their own; here it is the layers that choose
between the two ways.
"""

import numpy as np
import pytest
import torch
from tiny_models import config_of, engine_tensors, random_model

from slipstream.kernels import linear
from slipstream.kernels.attention import plan_attention
from slipstream.kernels.inputs import Unscaled, plain
from slipstream.kernels.options import KernelOptions
from slipstream.model.transformer import Step, Transformer

BLOCK, PROMPT = 16, 5
# By the number of times that a step of one token joins: twice a layer, unless norms or experts
# stand in between.
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


class Joining:
    """A dense product with the joint one, in torch."""

    takes_unscaled = True

    def __init__(self, weight, bias, joins):
        self.weight, self.bias, self.joins = weight, bias, joins

    def __call__(self, x):
        return torch.nn.functional.linear(plain(x), self.weight, self.bias)

    def joined(self, x, hidden, norm):
        assert len(x) == 1
        self.joins.append(self)
        hidden += self(x).float()
        parts = torch.stack([part.square().sum() for part in hidden.split(10, dim=1)])
        return Unscaled((hidden * norm.weight).to(norm.result), parts, norm.epsilon)


class Doubling:
    """Adapters of all tokens that add as much again."""

    def add(self, y, x, layer, product):
        y += y


def run(spec, tensors, adapters, options=KernelOptions()):
    """→ the logits of a prompt's last token and of the token behind it"""
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
def test_a_single_token_is_the_same_by_both_ways(family, adapters, monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of(family)))
    joins = []
    monkeypatch.setattr(linear, "_packs", lambda weight: False)
    expected = run(spec, tensors, adapters)
    monkeypatch.setattr(linear, "dense", lambda weight, bias: Joining(weight, bias, joins))
    got = run(spec, tensors, adapters)
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < 0.02, error
    # Of the prompt's tokens, one is wanted of the last layer.
    assert len(joins) == (0 if adapters else FAMILIES[family] * (spec.layers + 1))


def test_fused_gemv_off_takes_the_plain_kernels(monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of("llama")))
    joins = []
    monkeypatch.setattr(linear, "dense", lambda weight, bias: Joining(weight, bias, joins))
    fused = run(spec, tensors, None)
    assert len(joins) == 2 * (spec.layers + 1)
    joins.clear()
    plain_path = run(spec, tensors, None, KernelOptions(fused_gemv=False))
    assert not joins
    assert (fused - plain_path).abs().max() / plain_path.abs().max() < 0.02
