"""The table "Which settings sample" of docs/requests.md says what each protocol does."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine.sampling_params import SamplingParams
from slipstream.offline.sampling_params import SamplingParams as SamplingOptions
from slipstream.server.fields.values import read_request_fields
from slipstream.server.fields.values import sampling_params as triton_params
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.openai.fields import CompletionFields
from slipstream.server.openai.sampling import sampling_params as openai_params

PAGE = Path(__file__).parents[2] / "docs" / "requests.md"
# row of the table: settings that it is about
EXAMPLES: dict[str, list[dict[str, float]]] = {
    "none, or only `random_seed` or penalties": [{}, {"seed": 3}, {"presence_penalty": 1.0}],
    "`temperature` above 0": [{"temperature": 0.7}, {"temperature": 1.0, "seed": 3}],
    "`temperature` 0, with any others": [
        {"temperature": 0.0, "top_k": 40},
        {"temperature": 0.0, "top_p": 0.9, "min_p": 0.1},
    ],
    "`top_k` 1, with any others": [{"top_k": 1}, {"top_k": 1, "top_p": 0.9, "temperature": 2.0}],
    "`top_k` above 1": [{"top_k": 2}, {"top_k": 40}],
    "`top_p` above 0": [{"top_p": 0.1}, {"top_p": 1.0}],
    "`min_p`, `typical_p`": [{"min_p": 0.1}, {"typical_p": 0.5}],
}


def triton(settings: dict[str, float]) -> SamplingParams:
    request = InferRequest("m", "1", {}, parameters=dict(settings))
    return triton_params(read_request_fields(request, {}), lambda word: [])


def openai(settings: dict[str, float]) -> SamplingParams:
    fields = CompletionFields(model="m", **settings)  # type: ignore[arg-type]
    return openai_params(fields, 100, 8, False, 0)


def llm(settings: dict[str, float]) -> SamplingParams:
    return SamplingOptions(**settings).sampling()  # type: ignore[arg-type]


PROTOCOLS = {"Triton": triton, "OpenAI": openai, "`LLM`": llm}


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the table by row and protocol."""
    section = PAGE.read_text(encoding="utf-8").partition("## Which settings sample")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("row", EXAMPLES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_table_says_which_settings_sample(row: str, protocol: str) -> None:
    cell = table()[row][protocol]
    for settings in EXAMPLES[row]:
        found = PROTOCOLS[protocol](settings)
        assert found.greedy == (cell != "samples"), settings
        if cell == "needs `temperature`":
            assert not PROTOCOLS[protocol]({**settings, "temperature": 0.7}).greedy, settings


def test_the_table_gives_the_default_temperature() -> None:
    for protocol, cell in table()["default of `temperature`"].items():
        assert PROTOCOLS[protocol]({"top_p": 0.9}).temperature == float(cell), protocol


@pytest.mark.parametrize("top_p", [0.0, -1.0])
def test_a_top_p_of_0_or_less_is_as_if_it_was_not_sent_on_tritons_protocols(top_p: float) -> None:
    assert triton({"top_p": top_p}).greedy
    assert triton({"top_p": top_p, "top_k": 5}).top_p == 1.0
    rows = {*EXAMPLES, "`top_p` 0 (Triton: or less)", "default of `temperature`"}
    assert table().keys() == rows
