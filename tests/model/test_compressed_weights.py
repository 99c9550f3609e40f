"""Which weights get a 12-bit copy: those of the layers that every token takes, and the head's."""

import pytest
import torch
from tiny_models import config_of, engine_tensors, random_model

from slipstream.model import transformer
from slipstream.model.linear import Tensors
from slipstream.model.transformer import Transformer


@pytest.mark.parametrize(
    ("family", "of_a_layer"),
    [
        ("llama", ["attention.qkv", "attention.dense", "mlp.gate_up", "mlp.proj"]),
        ("gpt2", ["attention.qkv", "attention.dense", "mlp.fc", "mlp.proj"]),
        ("qwen3_moe", ["attention.qkv", "attention.dense"]),
        (
            "qwen2_moe",
            ["attention.qkv", "attention.dense", "mlp.shared.gate_up", "mlp.shared.proj"],
        ),
    ],
)
def test_layers_that_every_token_takes_are_compressed(family, of_a_layer, monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of(family)))
    make_linear = Tensors.linear
    names = {}
    calls = []

    def recorded(self, name, *sizes):
        linear = make_linear(self, name, *sizes)
        names[id(linear)] = name
        return linear

    monkeypatch.setattr(Tensors, "linear", recorded)
    monkeypatch.setattr(
        transformer, "compress_weights", lambda linears, most: calls.append((linears, most)) or 7
    )
    model = Transformer(spec, tensors, torch.float32, torch.device("cpu"), 64)
    assert model.compress_weights(1000) == 7
    ((linears, most),) = calls
    assert most == 1000
    assert linears[-1] is model.head.linear
    assert [names[id(linear)] for linear in linears[:-1]] == [
        f"transformer.layers.{layer}.{name}" for layer in range(spec.layers) for name in of_a_layer
    ]
