"""Quantisation by calibration: GPTQ and AWQ, their blocks, and what builds say and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_folder import quantise_folder
from run_engine import all_logits, logits_of
from tiny_hf_folder import save_model
from tiny_models import config_of, engine_tensors, random_model

from slipstream.kernels.blocks import matrix_of
from slipstream.weights.build import build_engine
from slipstream.weights.calibration.awq import apply_folds, find_folds
from slipstream.weights.calibration.gptq import gptq_levels
from slipstream.weights.calibration.rounding import (
    fitted_groups,
    output_error,
    q4_1_rows,
    q8_0_rows,
    whole_groups,
)
from slipstream.weights.calibration.settings import NEAREST, Calibration
from slipstream.weights.calibration.statistics import InputStatistics
from slipstream.weights.calibration.tokens import token_windows
from slipstream.weights.engine_folder import read_engine_folder
from slipstream.weights.sources.hf_folder import HuggingFaceFolder
from slipstream.weights.sources.source import SourceError

TOKENS = [[3, 1, 41, 59, 26, 5, 35, 90, 17, 64, 2, 8, 70, 33, 12, 5]]


def correlated_inputs(tokens: int, size: int) -> torch.Tensor:
    """Return inputs [tokens, size]: some columns are large, and all depend on each other."""
    torch.manual_seed(3)
    mixed = torch.randn(tokens, size // 4) @ torch.randn(size // 4, size)
    scales = torch.ones(size)
    scales[::9] = 12.0
    return (mixed + 0.3 * torch.randn(tokens, size)) * scales


def statistics_of(x: torch.Tensor) -> InputStatistics:
    found = InputStatistics.empty(x.shape[1])
    for part in x.split(50):
        found.add(part)
    return found


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(48, 128) * 0.05


def test_statistics_give_the_error_of_the_outputs(weight: torch.Tensor) -> None:
    x = correlated_inputs(300, 128)
    found = statistics_of(x)
    change = torch.randn_like(weight) * 0.01
    assert output_error(change, found.hessian) == pytest.approx(
        float((x @ change.t()).square().sum()), rel=1e-4
    )
    torch.testing.assert_close(found.magnitudes, x.abs().mean(0))
    factors = torch.rand(128) + 0.5
    expected = statistics_of(x / factors)
    divided = found.divided(factors)
    torch.testing.assert_close(divided.hessian, expected.hessian, rtol=1e-3, atol=0.5)
    torch.testing.assert_close(divided.magnitudes, expected.magnitudes)


def test_blocks_hold_what_the_levels_stand_for(weight: torch.Tensor) -> None:
    groups = whole_groups(weight)
    levels = groups.levels(weight)
    assert levels.min() == 0
    assert levels.max() == 15
    (rows,) = matrix_of([("Q4_1", q4_1_rows(levels, groups))]).expand()
    torch.testing.assert_close(torch.from_numpy(rows), groups.values(levels), rtol=0, atol=0)
    assert (groups.round(weight) - weight).abs().max() < 0.6 * groups.scales.max()
    (rows,) = matrix_of([("Q8_0", q8_0_rows(weight))]).expand()
    assert (torch.from_numpy(rows) - weight).abs().max() < weight.abs().max() / 250


def test_groups_of_equal_weights_are_exact_in_16_bits() -> None:
    weight = torch.full((2, 64), 0.25)
    weight[1] = 0.0
    groups = whole_groups(weight)
    torch.testing.assert_close(groups.round(weight), weight, rtol=0, atol=0)


def test_fitted_groups_and_gptq_lower_the_error_of_the_outputs(weight: torch.Tensor) -> None:
    hessian = statistics_of(correlated_inputs(300, 128)).hessian
    nearest = output_error(whole_groups(weight).round(weight) - weight, hessian)
    fitted = output_error(fitted_groups(weight, hessian).round(weight) - weight, hessian)
    levels, groups = gptq_levels(weight, hessian)
    corrected = output_error(groups.values(levels) - weight, hessian)
    assert fitted < 0.95 * nearest
    assert corrected < 0.5 * nearest
    assert levels.min() >= 0
    assert levels.max() <= 15


def test_gptq_rounds_to_nearest_where_inputs_do_not_depend_on_each_other(
    weight: torch.Tensor,
) -> None:
    levels, groups = gptq_levels(weight, torch.eye(128))
    torch.testing.assert_close(levels, groups.levels(weight), rtol=0, atol=0)


def test_gptq_takes_inputs_that_are_always_zero(weight: torch.Tensor) -> None:
    x = correlated_inputs(300, 128)
    x[:, 7] = 0
    levels, groups = gptq_levels(weight, statistics_of(x).hessian)
    assert torch.isfinite(groups.values(levels)).all()


FOLDED = {
    "llama": 4,  # two norms, the values, the multiplied half
    "qwen2": 4,  # with biases of queries, keys and values
    "gemma": 4,  # stored weights of norms lack 1
    "gemma2": 4,  # with norms of the outputs, too
    "gpt2": 3,  # layer norms with biases, no gate
    "gpt_neox": 3,  # a parallel residual with two norms
    "gptj": 2,  # a parallel residual with one norm for both
    "olmo2": 2,  # no norm before attention and MLP
    "mixtral": 2,  # no fold into or out of experts
}


@pytest.mark.parametrize("family", FOLDED)
def test_folds_of_awq_do_not_change_the_model(family: str) -> None:
    options = {} if family in ("gpt2", "gptj") else {"num_attention_heads": 4}
    spec, tensors = engine_tensors(random_model(config_of(family, **options)))
    folded = {name: tensor.float() for name, tensor in tensors.items()}
    for layer in range(spec.layers):
        prefix = f"transformer.layers.{layer}."
        own = {name: tensor for name, tensor in folded.items() if name.startswith(prefix)}
        names = [consumer for fold in find_folds(spec, layer, own) for consumer in fold.consumers]
        found = {
            name: statistics_of(correlated_inputs(60, own[f"{name}.weight"].shape[1]))
            for name in names
        }
        before = dict(own)
        apply_folds(spec, layer, own, found)
        folds = list(find_folds(spec, layer, own))
        assert len(folds) == FOLDED[family]
        for name in names:
            assert not torch.equal(own[f"{name}.weight"], before[f"{name}.weight"])
        folded.update(own)
    (expected,) = logits_of(spec, tensors, torch.float32, TOKENS)
    (found_logits,) = logits_of(spec, folded, torch.float32, TOKENS)
    torch.testing.assert_close(found_logits, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    return save_model(folder, decided=False)


def tokens_of_text(model: Path, method: str) -> list[list[int]]:
    return token_windows(HuggingFaceFolder(model, "tiny"), Calibration(method))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_an_engine_is_closer_to_the_model_than_one_rounded_to_nearest(
    model: Path, tmp_path: Path, method: str
) -> None:
    windows = tokens_of_text(model, method)[3:9]
    exact = build_engine(model, tmp_path / "exact", dtype="float32")
    nearest = build_engine(
        model, tmp_path / "nearest", dtype="float32", calibration=Calibration(NEAREST)
    )
    notes: list[str] = []
    built = build_engine(model, tmp_path / "q", dtype="float32", weight_only=method, notes=notes)
    assert notes == []
    expected, rounded, found = (
        torch.cat(all_logits(folder, torch.float32, windows)) for folder in (exact, nearest, built)
    )
    assert (found - expected).norm() < 0.95 * (rounded - expected).norm()
    engine = read_engine_folder(built)
    assert engine.quantisation.algorithm == "GGUF"
    forms = {
        name: {part.form for part in parts} for name, parts in engine.quantisation.stored.items()
    }
    assert forms.pop("lm_head.weight") == {"Q8_0"}
    assert len(forms) == 4 * engine.spec.layers
    assert all(form == {"Q4_1"} for form in forms.values())


def test_a_second_build_with_the_same_text_does_nothing(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words, and some more words. " * 40)
    seen: list[str] = []

    def watch(phase: str, done: int, total: int) -> None:
        seen.append(f"{phase} {done}/{total}")

    def build() -> bytes:
        seen.clear()
        folder = build_engine(
            model,
            tmp_path / "engine",
            weight_only="gptq",
            calibration=Calibration("gptq", text),
            progress=watch,
        )
        return (folder / "rank0.engine").read_bytes()

    first = build()
    assert "layers, quantised by gptq 1/2" in seen
    assert build() == first
    assert seen == []
    text.write_text("0123456789 9876543210\n" * 60)
    assert build() != first


def test_experts_are_rounded_to_nearest_and_the_build_says_so(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "mixtral", "mixtral", decided=False)
    notes: list[str] = []
    built = build_engine(folder, tmp_path / "engine", weight_only="gptq", notes=notes)
    assert notes == [
        "gptq is not applied to mlp.experts.gate_up, mlp.experts.proj: these linear layers are "
        "rounded to the nearest of 16 levels in groups of 32"
    ]
    stored = read_engine_folder(built).quantisation.stored
    assert {part.form for parts in stored.values() for part in parts} == {"Q4_1", "Q8_0"}


def test_what_cannot_be_calibrated_is_refused(model: Path, tmp_path: Path) -> None:
    def refused(match: str, source: Path = model, **options: object) -> None:
        with pytest.raises((SourceError, ValueError), match=match):
            build_engine(source, tmp_path / "engine", calibration=Calibration("awq", **options))
        assert not (tmp_path / "engine").exists()

    refused(
        "missing.txt: cannot be read: .*calibration takes a text file",
        text=tmp_path / "missing.txt",
    )
    (tmp_path / "empty.txt").write_text("\n")
    refused("empty.txt: empty", text=tmp_path / "empty.txt")
    (tmp_path / "data.bin").write_bytes(b"abc\xff\xfe")
    refused("data.bin: not a UTF-8 text.* at byte 3", text=tmp_path / "data.bin")
    odd = save_model(tmp_path / "odd", hidden_size=48, decided=False)
    refused("int4 needs sizes that are multiples of 32", odd)
    quantised = quantise_folder(save_model(tmp_path / "quantised"), "gptq")
    refused(r"quantised already \(gptq\); build it without --quantize awq", quantised)
    bare = save_model(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    refused("has no tokenizer.json", bare)


def test_a_long_text_is_cut_to_windows_that_are_spread_over_it(model: Path, tmp_path: Path) -> None:
    source = HuggingFaceFolder(model, "tiny")
    whole = token_windows(source, Calibration("awq"))
    assert sum(map(len, whole)) > 30_000
    few = token_windows(source, Calibration("awq", windows=4))
    assert len(few) == 4
    places = [whole.index(window) for window in few]
    assert places == [int(number * len(whole) / 4) for number in range(4)]
