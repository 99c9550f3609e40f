"""Tensors of the protocol both ways, and requests that fit the era of the model they go to."""

from __future__ import annotations

import numpy
import pytest

from slipstream.bench.core_model_report import Sample, core_model_rows, table_text
from slipstream.client.tensors import datatype_of, from_bytes, from_json, texts, to_bytes, to_json
from slipstream.client.token_request import TokenRequest, as_declared, beam_tokens

ARRAYS = [
    numpy.array([[1, -2], [3, 4]], dtype=numpy.int32),
    numpy.array([[True, False]]),
    texts(["a", "", "ü"]),
    numpy.array([[0.5]], dtype=numpy.float32),
    numpy.array([[7]], dtype=numpy.uint64),
]


@pytest.mark.parametrize("array", ARRAYS, ids=datatype_of)
def test_bytes_and_json_give_back_what_went_in(array: numpy.ndarray) -> None:
    for back in (
        from_bytes(datatype_of(array), list(array.shape), to_bytes(array)),
        from_json(to_json("x", array)),
    ):
        assert back.shape == array.shape
        assert back.tolist() == array.tolist()


def test_lengths_take_the_type_a_model_declares_and_what_asks_for_nothing_is_left_out() -> None:
    inputs = TokenRequest([5, 6], 3, end_id=2, top_k=4).inputs()
    declared = {"input_ids": "INT32", "request_output_len": "UINT32", "end_id": "UINT32"}
    sent = as_declared(inputs, declared)
    assert {name: datatype_of(sent[name]) for name in declared} == declared
    assert "return_log_probs" not in sent  # false, and the model does not know it
    # asked for: the server may say that it does not know it
    assert sent["runtime_top_k"].tolist() == [[4]]


def test_the_prompt_is_taken_off_only_where_it_came_back() -> None:
    echoed = {
        "output_ids": numpy.array([[[1, 2, 8, 9, -1]]]),
        "sequence_length": numpy.array([[4]]),
    }
    alone = {"output_ids": numpy.array([[[8, 9, -1]]]), "sequence_length": numpy.array([[2]])}
    assert beam_tokens(echoed, [1, 2]) == beam_tokens(alone, [1, 2]) == [[8, 9]]


def test_the_table_of_the_benchmark() -> None:
    samples = [Sample(0.0, 1.0, 10, 20), Sample(0.5, 2.0, 30, 40)]
    rows = dict(core_model_rows(samples))
    assert rows["Requests/Sec"] == "1.00"
    assert rows["OP tokens/sec"] == "30.00"
    assert rows["Avg. latency (ms)"] == "1250.00"
    assert rows["Avg. IP tokens per request"] == "20.00"
    assert table_text(("Stat", "Value"), [("Requests/Sec", "1.00")]).splitlines() == [
        "+--------------+-------+",
        "|     Stat     | Value |",
        "+--------------+-------+",
        "| Requests/Sec | 1.00  |",
        "+--------------+-------+",
    ]
