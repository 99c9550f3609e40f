"""The last layer runs its MLP for sampled tokens only, and writes the keys and values of all."""

import numpy as np
import pytest
import torch

from slipstream.kernels.attention import plan_attention
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Step, Transformer

TOKENS, BLOCK = 6, 16
KINDS = {
    "sequential": {},
    "output norms": {"output_norms": True},
    "parallel": {"parallel_residual": True, "norm": "layer"},
    "parallel, one norm": {"parallel_residual": True, "shared_norm": True, "norm": "layer"},
    "norms after": {"norms_after": True, "norm": "layer", "final_norm": False},
}


def random_model(**kind) -> Transformer:
    spec = ModelSpec(
        "LlamaForCausalLM",
        vocab_size=50,
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=8,
        ffn_size=48,
        max_positions=64,
        tied_embeddings=True,
        **kind,
    )
    torch.manual_seed(0)
    tensors = {"transformer.vocab_embedding.weight": torch.randn(50, 32)}
    norms = ["transformer.ln_f"] if spec.final_norm else []
    for layer in (f"transformer.layers.{index}" for index in range(2)):
        norms += [f"{layer}.input_layernorm"] + [f"{layer}.post_layernorm"] * (not spec.shared_norm)
        if spec.output_norms:
            norms += [f"{layer}.pre_feedforward_layernorm", f"{layer}.post_feedforward_layernorm"]
        for name, shape in (
            ("attention.qkv", (64, 32)),
            ("attention.dense", (32, 32)),
            ("mlp.gate_up", (96, 32)),
            ("mlp.proj", (32, 48)),
        ):
            tensors[f"{layer}.{name}.weight"] = torch.randn(shape) * 0.2
    for norm in norms:
        tensors |= {f"{norm}.weight": 1 + 0.1 * torch.randn(32)}
        tensors |= {f"{norm}.bias": 0.1 * torch.randn(32)} if spec.norm == "layer" else {}
    return Transformer(spec, tensors, torch.float32, torch.device("cpu"), 64)


def run(
    model: Transformer, samples: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the logits, the cache, and the number of tokens in the MLP of each layer."""
    cache, given = model.new_cache(2 * BLOCK), []
    for layer in model.layers:
        layer.mlp = lambda x, step, run=type(layer).mlp, layer=layer: (
            given.append(len(x)) or run(layer, x, step)
        )
    attention = plan_attention(np.array([[1]]), np.array([0]), np.array([TOKENS]), BLOCK, cache)
    step = Step(
        torch.arange(7, 7 + TOKENS),
        torch.arange(TOKENS),
        torch.arange(BLOCK, BLOCK + TOKENS),
        attention,
        None if samples is None else torch.tensor(samples, dtype=torch.int64),
    )
    with torch.inference_mode():
        return model(step, cache), cache, given


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("samples", [[5], [1, 4], []], ids=["last", "two", "none"])
def test_last_layer_runs_its_mlp_for_sampled_tokens_only(kind, samples):
    every, cache, given = run(random_model(**kind), None)
    assert given == [TOKENS, TOKENS]
    assert every.shape == (TOKENS, 50)
    some, same_cache, given = run(random_model(**kind), samples)
    assert given == [TOKENS, len(samples)][: 2 if samples else 1]
    assert torch.allclose(some, every[samples], atol=1e-5)
    assert torch.equal(same_cache, cache)
    assert cache[1].abs().sum() > 0
