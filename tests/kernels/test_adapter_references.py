"""The adapter kernels against a plain loop over tokens, and against each other. Without a GPU the
Triton ones run in Triton's interpreter, on small shapes.
"""

import os

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

from slipstream.kernels.adapter_layout import (  # noqa: E402
    DOWN_PROJ,
    O_PROJ,
    QKV,
    UP_PROJ,
    LinearShape,
    Matrices,
    PageLayout,
)
from slipstream.kernels.adapters import (  # noqa: E402
    AdapterPages,
    CpuStepAdapters,
    pack_adapter,
)

DEVICE = torch.device("cuda" if GPU else "cpu")
RANK, LAYERS, PAGES = 4, 2, 9
SHAPES = (
    LinearShape(40, (48, 20, 20)),
    LinearShape(48, (40,)),
    LinearShape(40, (136, 136)),
    LinearShape(136, (40,)),
)
LAYOUT = PageLayout(SHAPES, LAYERS, RANK)


def some_adapter(seed: int, ranks: dict[tuple[int, int], int]) -> list[Matrices]:
    """ranks: (linear, part) → rank, the same in every layer."""
    draw = np.random.default_rng(seed)
    return [
        Matrices(
            layer,
            linear,
            part,
            draw.standard_normal((rank, SHAPES[linear].inputs), dtype=np.float32),
            draw.standard_normal((SHAPES[linear].outputs[part], rank), dtype=np.float32).T,
        )
        for layer in range(LAYERS)
        for (linear, part), rank in ranks.items()
    ]


ADAPTERS = {
    (1,): some_adapter(1, {(QKV, 0): 4, (QKV, 2): 3}),  # no k, and nothing beside attention
    (2, 5): some_adapter(
        2,
        {
            (QKV, 0): 7,
            (QKV, 1): 2,
            (O_PROJ, 0): 4,
            (UP_PROJ, 0): 5,
            (UP_PROJ, 1): 8,
            (DOWN_PROJ, 0): 6,
        },
    ),
    (3,): some_adapter(3, {(UP_PROJ, 1): 1, (DOWN_PROJ, 0): 4}),
    (9,): some_adapter(4, {(QKV, 0): 2, (QKV, 1): 2, (QKV, 2): 2, (O_PROJ, 0): 2}),
}
MIXES = {
    "base only beside one": [((), 3), ((1,), 1), ((), 1)],
    "decode of all": [((1,), 1), ((), 1), ((2, 5), 1), ((3,), 1), ((9,), 1), ((1,), 1)],
    "in the order of pages": [((), 2), ((1,), 1), ((2, 5), 1), ((3,), 1), ((), 1)],
    "prompts": [((1,), 70), ((2, 5), 20), ((), 5), ((2, 5), 130)],
    "mixed": [((9,), 1), ((3,), 2), ((), 1), ((1,), 40), ((3,), 1), ((2, 5), 3)],
}


def stored(device: torch.device) -> AdapterPages:
    pages = AdapterPages(LAYOUT, PAGES, 2, "float32", str(device))
    everything = [
        (linear, part) for linear in range(4) for part in range(len(SHAPES[linear].outputs))
    ]
    for numbers in ADAPTERS:  # what was there before must leave no trace
        before = some_adapter(9, dict.fromkeys(everything, len(numbers) * RANK))
        pages.write(numbers, pack_adapter(LAYOUT, before, "float32", str(device)))
    for numbers, adapter in ADAPTERS.items():
        pages.write(numbers, pack_adapter(LAYOUT, adapter, "float32", str(device)))
    return pages


def expected(y: torch.Tensor, x: torch.Tensor, mix: list, layer: int, linear: int) -> torch.Tensor:
    y, start = y.clone(), 0
    for numbers, count in mix:
        for matrices in ADAPTERS[numbers] if numbers else ():
            if (matrices.layer, matrices.linear) == (layer, linear):
                column = sum(SHAPES[linear].outputs[: matrices.part])
                first, second = (
                    torch.from_numpy(matrices.first),
                    torch.from_numpy(matrices.second.copy()),
                )
                delta = x[start : start + count] @ first.t() @ second
                y[start : start + count, column : column + delta.shape[1]] += delta
        start += count
    return y


def given(mix: list, linear: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = sum(count for _, count in mix)
    x = torch.randn(tokens, SHAPES[linear].inputs, generator=generator)
    return torch.randn(tokens, sum(SHAPES[linear].outputs), generator=generator), x


@pytest.mark.parametrize("linear", [QKV, O_PROJ, UP_PROJ, DOWN_PROJ])
@pytest.mark.parametrize("mix", MIXES)
def test_cpu_groups_match_a_loop_over_tokens(mix, linear):
    y, x = given(MIXES[mix], linear)
    step = CpuStepAdapters(stored(torch.device("cpu")), *zip(*MIXES[mix], strict=True))
    for layer in range(LAYERS):
        got = y.clone()
        step.add(got, x, layer, linear)
        torch.testing.assert_close(
            got, expected(y, x, MIXES[mix], layer, linear), rtol=1e-4, atol=1e-4
        )


def gpu_step(mix: list, as_decode: bool = False):
    from slipstream.kernels.gpu.adapters import (
        TILE_TOKENS,
        GpuStepAdapters,
        Tiles,
        cut_adapter_tiles,
    )

    counts = np.array([count for _, count in mix])
    row_pages = torch.zeros(len(mix) + 1, 3, dtype=torch.int32)
    for row, (numbers, _) in enumerate(mix):
        row_pages[row, : 1 + len(numbers)] = torch.tensor([len(numbers), *numbers])
    parts = cut_adapter_tiles(np.arange(len(mix)), counts)
    starts, sizes, rows = (torch.from_numpy(part.astype(np.int32)).to(DEVICE) for part in parts)
    tiles = Tiles(starts, sizes, rows, 1 if as_decode else TILE_TOKENS)
    return GpuStepAdapters(stored(DEVICE), row_pages.to(DEVICE), tiles)


@pytest.mark.parametrize("linear", [QKV, O_PROJ, UP_PROJ, DOWN_PROJ])
@pytest.mark.parametrize("mix", MIXES)
def test_gpu_kernels_match_a_loop_over_tokens(mix, linear):
    pytest.importorskip(
        "triton", reason="the kernels need Triton, which a CPU installation of torch does not bring"
    )
    y, x = given(MIXES[mix], linear)
    step = gpu_step(MIXES[mix], as_decode=all(count == 1 for _, count in MIXES[mix]))
    for layer in range(LAYERS):
        got = y.clone().to(DEVICE)
        step.add(got, x.to(DEVICE), layer, linear)
        torch.testing.assert_close(
            got.cpu(), expected(y, x, MIXES[mix], layer, linear), rtol=1e-4, atol=1e-4
        )


def test_row_pages_are_read_when_the_step_runs():
    """A row may change its adapter without a new plan, as captured steps need."""
    pytest.importorskip("triton")
    mix = MIXES["decode of all"]
    y, x = given(mix, UP_PROJ)
    step = gpu_step(mix, as_decode=True)
    other = [((), 1), *mix[2:], mix[1]]
    table = torch.zeros_like(step._row_pages)
    for row, (numbers, _) in enumerate(other):
        table[row, : 1 + len(numbers)] = torch.tensor([len(numbers), *numbers])
    step._row_pages.copy_(table)
    got = y.clone().to(DEVICE)
    step.add(got, x.to(DEVICE), 1, UP_PROJ)
    torch.testing.assert_close(got.cpu(), expected(y, x, other, 1, UP_PROJ), rtol=1e-4, atol=1e-4)


def test_copy_runs_kernel_writes_the_runs_and_nothing_else():
    pytest.importorskip("triton")
    from slipstream.kernels.gpu.copy_runs import copy_runs

    values, page = torch.arange(3000.0), torch.full((4000,), -1.0)
    expected_page = page.clone()
    runs = torch.tensor([[5, 0, 1500], [0, 2000, 3], [2999, 3999, 1]], dtype=torch.int32)
    for start, place, length in runs.tolist():
        expected_page[place : place + length] = values[start : start + length]
    moved = page.to(DEVICE)
    copy_runs(values.to(DEVICE), runs.to(DEVICE), moved)
    assert torch.equal(moved.cpu(), expected_page)
