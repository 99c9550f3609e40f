"""Whose weights a GPU keeps copies of: the products that every token takes, and the head's."""

import pytest
import torch
from tiny_models import config_of, engine_tensors, random_model

from slipstream.kernels import linear
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
def test_whose_weights_are_copied(family, of_a_layer, monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of(family)))
    made, names, asked = Tensors.product, {}, []

    def noted(self, name, *sizes):
        product = made(self, name, *sizes)
        names[id(product)] = name
        return product

    monkeypatch.setattr(Tensors, "product", noted)
    monkeypatch.setattr(
        linear, "copy_weights", lambda products, most: asked.append((products, most)) or 7
    )
    model = Transformer(spec, tensors, torch.float32, torch.device("cpu"), 64)
    assert model.copy_weights(1000) == 7
    ((products, most),) = asked
    assert most == 1000
    assert products[-1] is model.head.product
    assert [names[id(product)] for product in products[:-1]] == [
        f"transformer.layers.{layer}.{name}" for layer in range(spec.layers) for name in of_a_layer
    ]
