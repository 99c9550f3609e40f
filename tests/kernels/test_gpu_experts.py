"""The kernels of a mixture of experts against their torch references. Without a GPU they run in
Triton's interpreter.
"""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

pytest.importorskip(
    "triton", reason="the kernels need Triton, which a CPU installation of torch does not bring"
)

from slipstream.kernels.activation import silu_gated  # noqa: E402
from slipstream.kernels.experts import grouped_gemm, mixture, route  # noqa: E402
from slipstream.kernels.gpu import experts as gpu_kernels  # noqa: E402
from slipstream.model.experts import cpu_experts, gpu_experts  # noqa: E402
from slipstream.model.linear import Tensors  # noqa: E402
from slipstream.model.spec import Experts, ModelSpec  # noqa: E402
from slipstream.weights.quantise import quantise_rows  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
CHOICES = {
    "one token": (1, 2, 5),
    "every expert": (40, 3, 4),
    "few of many": (3, 2, 40),
    "several tiles an expert": (90, 2, 3),
    "large tiles": (150, 2, 2),
    "more pairs than a block sorts": (600, 2, 3),
}
if GPU:
    CHOICES |= {"prompt": (4096, 8, 128), "batch": (256, 8, 128), "two of eight": (2000, 2, 8)}


def chosen_experts(name: str) -> tuple[torch.Tensor, int]:
    tokens, per_token, experts = CHOICES[name]
    generator = torch.Generator().manual_seed(3)
    return torch.stack(
        [torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]
    ), experts


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (got.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm()
    return bool(error < TOLERANCE[got.dtype])


@pytest.mark.parametrize("name", CHOICES)
def test_plan_sorts_pairs_and_covers_each_by_one_tile(name):
    chosen, experts = chosen_experts(name)
    plan = gpu_kernels.plan_experts(chosen.to(DEVICE), experts)
    pairs = chosen.flatten()
    assert torch.equal(plan.order.cpu().long(), pairs.argsort(stable=True))
    counts = pairs.bincount(minlength=experts)
    assert plan.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    covered = []
    for expert, first in zip(plan.tile_expert.tolist(), plan.tile_first.tolist(), strict=True):
        if expert >= 0:
            covered += range(first, min(first + plan.tile, int(plan.starts[expert + 1])))
    assert covered == list(range(len(pairs)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 24), (130, 70)])
def test_grouped_gemm_of_tokens_and_of_pairs(dtype, name, outputs, inputs):
    torch.manual_seed(0)
    chosen, experts = chosen_experts(name)
    weight = torch.randn(experts, outputs, inputs).to(dtype)
    plan = gpu_kernels.plan_experts(chosen.to(DEVICE), experts)
    for rows in (len(chosen), chosen.numel()):
        x = torch.randn(rows, inputs).to(dtype)
        got = gpu_kernels.grouped_gemm(x.to(DEVICE), weight.to(DEVICE), None, plan)
        assert close(got, grouped_gemm(x.float(), weight.float(), chosen))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_grouped_gemm_with_8_bit_weights(dtype, eight):
    torch.manual_seed(0)
    chosen, experts = chosen_experts("every expert")
    stored = torch.randint(-128, 128, (experts, 40, 24)).float().to(eight)
    scales = torch.rand(experts, 40)
    x = torch.randn(len(chosen), 24).to(dtype)
    plan = gpu_kernels.plan_experts(chosen.to(DEVICE), experts)
    got = gpu_kernels.grouped_gemm(x.to(DEVICE), stored.to(DEVICE), scales.to(DEVICE), plan)
    assert close(got, grouped_gemm(x.float(), stored.float() * scales[..., None], chosen))


def test_mixture_equals_the_sum_over_pairs():
    torch.manual_seed(0)
    x, gate_up, proj = torch.randn(7, 12), torch.randn(5, 16, 12), torch.randn(5, 12, 8)
    chosen, shares = route(torch.randn(7, 5), 2, normalised=False)
    experts = [
        lambda part, e=expert: silu_gated(part @ gate_up[e].T) @ proj[e].T for expert in range(5)
    ]
    middle = silu_gated(grouped_gemm(x, gate_up, chosen))
    pairs = grouped_gemm(middle, proj, chosen).view(7, 2, 12)
    expected = (pairs * shares[..., None]).sum(1)
    assert torch.allclose(mixture(x, chosen, shares, experts), expected, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 8])
def test_cpu_and_gpu_experts_agree(bits):
    torch.manual_seed(0)
    spec = ModelSpec("MixtralForCausalLM", 8, 32, 1, 2, 2, 16, 48, 64, experts=Experts(5, 2, 48))
    stored = {}
    for name, shape in (("gate_up", (5 * 96, 32)), ("proj", (5 * 32, 48))):
        stored[f"experts.{name}.weight"] = torch.randn(shape)
        if bits:
            stored[f"experts.{name}.weight"], stored[f"experts.{name}.scales"] = quantise_rows(
                stored[f"experts.{name}.weight"], bits, 0
            )
    x, (chosen, shares) = torch.randn(9, 32), route(torch.randn(9, 5), 2, normalised=True)
    on_cpu = cpu_experts(
        spec, Tensors(stored, torch.float32, torch.device("cpu")), "experts", silu_gated, range(5)
    )
    on_gpu = gpu_experts(
        spec, Tensors(stored, torch.float32, DEVICE), "experts", silu_gated, range(5)
    )
    assert close(
        on_gpu(x.to(DEVICE), chosen.to(DEVICE), shares.to(DEVICE)), on_cpu(x, chosen, shares)
    )


def test_experts_of_two_ranks_add_up_on_a_gpu():
    torch.manual_seed(0)
    spec = ModelSpec("MixtralForCausalLM", 8, 32, 1, 2, 2, 16, 48, 64, experts=Experts(6, 2, 48))
    gate_up = torch.randn(6, 96, 32)
    proj = torch.randn(6, 32, 48)
    x = torch.randn(9, 32).to(DEVICE)
    chosen, shares = route(torch.randn(9, 6).to(DEVICE), 2, normalised=True)
    outputs = []
    for held in (range(6), range(3), range(3, 6)):
        stored = {
            "experts.gate_up.weight": gate_up[held.start : held.stop].reshape(-1, 32),
            "experts.proj.weight": proj[held.start : held.stop].reshape(-1, 48),
        }
        source = Tensors(stored, torch.float32, DEVICE)
        run = gpu_experts(spec, source, "experts", silu_gated, held)
        outputs.append(run(x, chosen, shares))
    whole, first, second = outputs
    assert torch.isfinite(first).all()
    assert close(first + second, whole.cpu())


def test_int4_experts_are_refused_on_a_gpu():
    spec = ModelSpec("MixtralForCausalLM", 8, 32, 1, 2, 2, 16, 32, 64, experts=Experts(5, 2, 32))
    weight, scales = quantise_rows(torch.randn(5 * 64, 32), 4, 32)
    stored = {"experts.gate_up.weight": weight, "experts.gate_up.scales": scales}
    with pytest.raises(
        ValueError, match=r"experts\.gate_up: experts of four bits run on a CPU only"
    ):
        gpu_experts(spec, Tensors(stored, torch.float32, DEVICE), "experts", silu_gated, range(5))


@pytest.mark.parametrize("normalised", [False, True])
def test_route_returns_the_top_experts_and_their_weights(normalised):
    chosen, shares = route(torch.tensor([[0.0, 2.0, 1.0, -1.0]]), 2, normalised)
    whole = torch.tensor([0.0, 2.0, 1.0, -1.0]).softmax(0)[[1, 2]]
    assert chosen.tolist() == [[1, 2]]
    assert torch.allclose(shares[0], whole / whole.sum() if normalised else whole)
