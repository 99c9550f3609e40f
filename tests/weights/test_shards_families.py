"""Ranks of the families that have one test of parity each: their logits are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_variants import VARIANTS
from rank_models import build_rank_engine
from run_engine import logits_of
from thread_ranks import ThreadRanks, on_ranks

from slipstream.weights.shards import check_ranks, possible_ranks, rank_spec, rank_tensors

# int4 has groups of 32 columns, and a half of every size must be whole groups
SIZES = {"hidden_size": 128, "intermediate_size": 256}
TOKENS = [[3, 1, 4, 94, 5, 9, 2, 6], [7]]
DEFAULT = ("olmo3", "smollm3", "granite", "cohere2", "glm4-0414", "exaone4", "nemotron", "phi")


def compare(name: str, folder: Path, weight_only: str | None, ranks: int) -> None:
    """Compare the logits of several ranks with those of one, if they can divide the model."""
    variant = VARIANTS[name]
    if "hidden_size" in variant.sizes and "hidden_size" not in variant.options:
        sizes = {**SIZES, **{key: variant.options[key] for key in SIZES if key in variant.options}}
        variant = replace(variant, sizes={**variant.sizes, **sizes})
    variant.write(variant.model(), folder / "model")
    engine = build_rank_engine(folder / "model", folder / "engine", weight_only)
    if possible_ranks(engine.spec, engine.quantisation, ranks) != ranks:
        assert (name, weight_only, ranks) in REFUSED
        with pytest.raises(ValueError, match=f"tp_size {ranks} does not divide this model"):
            check_ranks(engine.spec, engine.quantisation, ranks)
        return
    expected = logits_of(engine.spec, engine.tensors(), torch.float32, TOKENS)

    def run(own: ThreadRanks) -> list[torch.Tensor]:
        spec = rank_spec(engine.spec, own.size)
        tensors = rank_tensors(engine, own.rank, own.size)
        found: list[torch.Tensor] = logits_of(spec, tensors, torch.float32, TOKENS, own)
        return found

    first, *others = on_ranks(ranks, run)
    for index, wanted in enumerate(expected):
        assert all(torch.equal(other[index], first[index]) for other in others)
        close = 1e-4 * wanted.abs().max().item()
        torch.testing.assert_close(first[index], wanted, rtol=1e-3, atol=close)


REFUSED: set[tuple[str, str | None, int]] = {("nemotron", "int4", 2)}  # heads of 24


@pytest.mark.parametrize("weight_only", ["int8", "int4"])
@pytest.mark.parametrize("name", DEFAULT)
def test_two_ranks_of_newer_families_compute_the_logits_of_one(tmp_path, name, weight_only):
    compare(name, tmp_path, weight_only, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("weight_only", [None, "int8", "int4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_of_every_variant_compute_the_logits_of_one(tmp_path, name, weight_only, ranks):
    compare(name, tmp_path, weight_only, ranks)
