"""Engines of two and four ranks generate the tokens of one rank."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from rank_models import FAMILIES, build_rank_engine, save_rank_model
from rank_runs import KINDS, record_plans, run, run_alone, run_ranks, settings_of
from tiny_adapters import ALL_MODULES, save_adapter

from slipstream.weights.load import start_engine

RUNS = [name for name in KINDS if name not in ("adapters", "flipped") and "cancels" not in name]
DEFAULT = {
    "llama": RUNS,
    "qwen2_moe": RUNS,  # whole experts, and a shared one
    "gptj": RUNS,  # parallel residual
    "gpt2": ["greedy", "scores"],  # learned positions, biases, a tied head
    "gemma2": ["greedy", "penalties"],  # output norms and soft caps
    "mixtral": ["greedy", "preempted"],  # a part of each expert
    "gemma": ["greedy"],  # one KV head
    "olmo2": ["greedy", "sampled"],  # norms over the heads of all ranks
    "olmo3": ["greedy"],  # the same, and windows
}
INT4 = "llama int4"
PLANS = 200  # the most that are recorded of a run
# with preemptions, blocks that come back from host memory, and draft tokens
REPLAYED = ("more cancels", "preempted", "host", "lookup")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that builds the engine of a family once."""
    folder = tmp_path_factory.mktemp("engines")

    def build(name: str) -> str:
        family, _, weight_only = name.partition(" ")
        engine = folder / name.replace(" ", "-")
        if not engine.exists():
            model = folder / f"{family}-model"
            if not model.exists():
                save_rank_model(family, model)
            build_rank_engine(model, engine, weight_only or None)
        return str(engine)

    return build


@pytest.fixture(scope="module")
def adapted_engine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build an engine with two adapters beside it."""
    import transformers

    folder = tmp_path_factory.mktemp("adapted")
    save_rank_model("llama", folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    save_adapter(model, folder / "adapter1", rank=4, modules=ALL_MODULES, seed=1)
    save_adapter(model, folder / "adapter2", rank=12, seed=2)
    build_rank_engine(folder / "model", folder / "engine")
    return str(folder / "engine")


def run_group(
    size: int, cases: list[tuple[str, str, str]], plans: Mapping[str, list[bytes]] = {}
) -> dict:
    """plans: recorded plans, by the name of the case that replays them"""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # a short path, as sockets need it
    for name, frames in plans.items():
        (folder / f"{name}.plans").write_text("\n".join(frame.hex() for frame in frames))
    try:
        return run_ranks(size, cases, folder)
    finally:
        shutil.rmtree(folder)


def case_name(family: str, kind: str) -> str:
    return f"{family}: {kind}"


@pytest.fixture(scope="module")
def recorded(engines) -> dict[str, tuple[list[bytes], list[list[int]]]]:
    """Return plans of runs with one rank, and the tokens that they sampled, by kind."""
    return {kind: record_plans(engines("llama"), kind, PLANS) for kind in REPLAYED}


@pytest.fixture(scope="module")
def two_ranks(engines, adapted_engine, recorded) -> dict:
    """Return the results of all default runs with two ranks."""
    cases = [
        (case_name(family, kind), engines(family), kind)
        for family, kinds in DEFAULT.items()
        for kind in kinds
    ]
    cases += [
        (INT4, engines(INT4), "greedy"),
        ("adapters", adapted_engine, "adapters"),
        ("cancels", engines("llama"), "cancels"),
        ("flipped", engines("llama"), "flipped"),
    ]
    cases += [(f"replayed {kind}", engines("llama"), kind) for kind in REPLAYED]
    return run_group(2, cases, {f"replayed {kind}": recorded[kind][0] for kind in REPLAYED})


def assert_same(found: dict, expected: dict, ranks: int) -> None:
    assert found["tokens"] == expected["tokens"]
    assert any(found["tokens"].values()) or found["beams"]
    assert found["beams"] == expected["beams"]
    assert found["reasons"] == expected["reasons"]
    assert found.get("again") == expected.get("again")
    assert found["numbers"].keys() == expected["numbers"].keys()
    for name, values in expected["numbers"].items():
        assert found["numbers"][name] == pytest.approx(values, rel=1e-3, abs=1e-3), name
    for name in ("preemptions", "draft_tokens", "reused_blocks"):
        assert found[name] == expected[name], name
    assert (found["ranks"], expected["ranks"]) == (ranks, 1)
    assert found["weight_bytes"] < expected["weight_bytes"]
    assert "problem" not in found, found.get("problem")  # the digests of all ranks are equal


@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family, kinds in DEFAULT.items() for kind in kinds]
)
def test_two_ranks_generate_the_tokens_of_one(two_ranks, engines, family, kind):
    expected = run_alone(engines(family), kind)
    assert_same(two_ranks[case_name(family, kind)], expected, 2)


def test_the_runs_do_what_they_are_for(two_ranks):
    assert two_ranks["llama: preempted"]["preemptions"] > 0
    assert two_ranks["llama: lookup"]["draft_tokens"] > 0
    assert two_ranks["llama: host"]["reused_blocks"] > 0
    assert len(two_ranks["llama: beams"]["beams"]["0"]) == 3
    sampled = two_ranks["llama: sampled"]["tokens"]
    assert sampled != two_ranks["llama: greedy"]["tokens"]


@pytest.mark.parametrize("kind", REPLAYED)
def test_recorded_plans_of_one_rank_give_two_ranks_the_same_tokens(two_ranks, recorded, kind):
    frames, tokens = recorded[kind]
    assert len(frames) == (PLANS if kind == "more cancels" else len(tokens))
    assert sum(map(len, tokens)) >= 80
    assert two_ranks[f"replayed {kind}"] == {"tokens": tokens, "ranks": 2}


def test_prompts_that_are_scored_in_pieces_have_the_same_scores(engines):
    """As with several ranks: a step has logits of a few tokens of a long prompt only."""
    expected = run_alone(engines("llama"), "scores")
    loop = start_engine(engines("llama"), settings_of(KINDS["scores"], 1))
    loop.scheduler.prompt_limits.most_scored = 5
    plans = []
    launch = loop.runner.launch
    loop.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    found = run(loop, "scores", engines("llama"))
    assert found["tokens"] == expected["tokens"]
    for name, values in expected["numbers"].items():
        assert found["numbers"][name] == pytest.approx(values, rel=1e-4, abs=1e-4), name
    prompts = [plan.tokens - sum(count == 1 for count in plan.counts) for plan in plans]
    assert max(prompts) == 5


def test_compiled_code_computes_the_parts_of_models_that_it_knows(two_ranks):
    compiled = {name for name, found in two_ranks.items() if found.get("compiled")}
    families = ("llama", "gptj", "gpt2", "gemma", "gemma2", "mixtral")
    assert {case_name(family, "greedy") for family in families} <= compiled
    assert {INT4, "adapters", "cancels"} <= compiled


def test_an_engine_of_several_ranks_scores_prompts_in_pieces(two_ranks):
    assert two_ranks["llama: greedy"]["most_scored"] == 64


def test_two_ranks_with_int4_weights_generate_the_tokens_of_one(two_ranks, engines):
    assert_same(two_ranks[INT4], run_alone(engines(INT4), "greedy"), 2)


def test_two_adapters_in_one_batch_give_the_tokens_of_one_rank(two_ranks, adapted_engine):
    expected = run_alone(adapted_engine, "adapters")
    assert_same(two_ranks["adapters"], expected, 2)
    assert set(expected["reasons"].values()) == {"length"}


def test_ranks_agree_after_random_cancels(two_ranks, engines):
    expected = run_alone(engines("llama"), "cancels")
    assert two_ranks["cancels"]["ended"] == expected["ended"]
    assert sum(expected["ended"].values()) == 100
    assert expected["ended"]["cancelled"] > 50
    assert "problem" not in two_ranks["cancels"]


def test_a_token_that_differs_is_found_and_its_row_is_named(two_ranks):
    assert two_ranks["flipped"]["problem"] == "rank 1 holds other tokens than rank 0 (row 2)"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_families_and_kinds(engines, size):
    families = FAMILIES if size == 2 else ("llama", "gemma", "qwen3_moe", "gptj", "olmo2")
    cases = [
        (case_name(family, kind), engines(family), kind) for family in families for kind in RUNS
    ]
    found = run_group(size, cases)
    for name, engine, kind in cases:
        assert_same(found[name], run_alone(engine, kind), size)


@pytest.mark.slow
def test_adapters_of_four_ranks_that_share_kv_heads(adapted_engine):
    found = run_group(4, [("adapters", adapted_engine, "adapters")])["adapters"]
    assert_same(found, run_alone(adapted_engine, "adapters"), 4)


@pytest.mark.slow
def test_ranks_agree_after_ten_thousand_cancels(engines):
    found = run_group(2, [("cancels", engines("llama"), "many cancels")])["cancels"]
    assert sum(found["ended"].values()) == 10_000
    assert "problem" not in found
