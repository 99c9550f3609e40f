"""Levels of load, the requests for a text model, and prompts from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from slipstream.bench.perf_analyzer import parse_levels
from slipstream.bench.prompts import Lengths
from slipstream.bench.text_load import (
    LoadLevel,
    PromptSettings,
    TextModel,
    create_rows,
    read_prompts,
)


class LetterTokenizer:
    """One token per letter."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def config(**inputs: str) -> dict[str, Any]:
    tensors = [
        {"name": name, "data_type": kind, "dims": ["1"], "optional": name == "min_length"}
        for name, kind in inputs.items()
    ]
    return {"input": tensors, "output": [{"name": "text_output"}]}


def settings(**changes: Any) -> PromptSettings:
    values = {
        "input_file": None,
        "num_prompts": 3,
        "input_tokens": Lengths(5, 0),
        "output_tokens": Lengths(-1, 0),
        "fixed_output_length": False,
        "random_seed": 0,
        "streaming": False,
    }
    return PromptSettings(**{**values, **changes})


@pytest.mark.parametrize(
    ("text", "levels"),
    [("3", [3]), ("1:3", [1, 2, 3]), ("1:10:4", [1, 5, 9]), ("0.5:1:0.5", [0.5, 1])],
)
def test_a_range_includes_its_last_level(text: str, levels: list[float]) -> None:
    assert parse_levels(text) == levels


@pytest.mark.parametrize("text", ["x", "1:2:3:4", "0:2", "1:2:0", "1:2:-1"])
def test_a_wrong_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_levels(text)


def test_a_level_names_its_load() -> None:
    concurrency = LoadLevel(4)
    assert (concurrency.text, concurrency.folder_name) == ("4 in flight", "concurrency4")
    rate = LoadLevel(1, 2.5)
    assert (rate.text, rate.folder_name) == ("2.5 requests a second", "request_rate2.5")


def test_rows_use_the_models_in_turn_and_the_default_length() -> None:
    rows = create_rows(["a", "b"], settings(streaming=True), LetterTokenizer())
    assert [row["model"] for row in rows] == ["a", "b", "a"]
    assert {row["max_tokens"] for row in rows} == {256}
    assert all(row["stream"] is True and "min_length" not in row for row in rows)
    assert {len(row["text_input"]) for row in rows} == {5}


def test_a_fixed_output_length_is_the_minimum_too() -> None:
    fixed = settings(output_tokens=Lengths(7, 0), fixed_output_length=True, extra_inputs={"x": "1"})
    (row, *_) = create_rows(["a"], fixed, LetterTokenizer())
    assert (row["max_tokens"], row["min_length"], row["x"]) == (7, 7, "1")


def test_a_request_has_the_names_and_types_of_the_model() -> None:
    old = TextModel(
        "m",
        {
            "max_batch_size": 8,
            "input": [
                {"name": "INPUT_0", "data_type": "TYPE_STRING", "dims": ["1"]},
                {"name": "INPUT_1", "data_type": "TYPE_UINT32", "dims": ["1"]},
                {"name": "INPUT_2", "data_type": "TYPE_STRING", "dims": ["-1"]},
            ],
            "output": [{"name": "OUTPUT_0"}],
        },
    )
    request = old.request({"model": "m", "text_input": "hi", "max_tokens": 3}, 5)
    assert (request.model, request.request_id, old.text_output) == ("m", "5", "OUTPUT_0")
    assert request.inputs["INPUT_0"].tolist() == [[b"hi"]]
    assert request.inputs["INPUT_1"].dtype == numpy.uint32
    assert request.inputs["INPUT_2"].tolist() == [[b""]]  # required, so it is sent empty


def test_a_request_to_a_model_without_batches_has_the_declared_shape() -> None:
    model = TextModel("m", config(text_input="TYPE_STRING", max_tokens="TYPE_INT32"))
    request = model.request({"model": "m", "text_input": "hi", "max_tokens": 3}, 0)
    assert {name: array.tolist() for name, array in request.inputs.items()} == {
        "text_input": [b"hi"],
        "max_tokens": [3],
    }


def test_a_model_without_text_and_an_unknown_input_are_refused() -> None:
    with pytest.raises(ValueError, match="model 'm' does not take and give text"):
        TextModel("m", config(input_ids="TYPE_INT32"))
    model = TextModel("m", config(text_input="TYPE_STRING"))
    with pytest.raises(ValueError, match="model 'm' has no input colour"):
        model.request({"model": "m", "text_input": "hi", "colour": "red"}, 0)


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text_input": "one"}\n\n{"text": "two"}\n')
    assert list(read_prompts(file)) == ["one", "two"]
    file.write_text('{"question": "one"}\n')
    with pytest.raises(ValueError, match="not a JSON object with text_input on each line"):
        list(read_prompts(file))
