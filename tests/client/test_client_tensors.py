"""Conversion of tensors, requests in the types of a model's release, and the benchmark's table."""

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
def test_tensors_survive_bytes_and_json(array: numpy.ndarray) -> None:
    for back in (
        from_bytes(datatype_of(array), list(array.shape), to_bytes(array)),
        from_json(to_json("x", array)),
    ):
        assert back.shape == array.shape
        assert back.tolist() == array.tolist()


def test_requests_use_declared_types_and_omit_undeclared_zeros() -> None:
    inputs = TokenRequest([5, 6], 3, end_id=2, top_k=4).inputs()
    declared = {"input_ids": "INT32", "request_output_len": "UINT32", "end_id": "UINT32"}
    sent = as_declared(inputs, declared)
    assert {name: datatype_of(sent[name]) for name in declared} == declared
    assert "return_log_probs" not in sent  # false, and the model does not declare it
    # true, so it is sent, and the server can refuse it
    assert sent["runtime_top_k"].tolist() == [[4]]


def test_the_prompt_is_removed_only_if_the_answer_holds_it() -> None:
    echoed = {
        "output_ids": numpy.array([[[1, 2, 8, 9, -1]]]),
        "sequence_length": numpy.array([[4]]),
    }
    alone = {"output_ids": numpy.array([[[8, 9, -1]]]), "sequence_length": numpy.array([[2]])}
    assert beam_tokens(echoed, [1, 2]) == beam_tokens(alone, [1, 2]) == [[8, 9]]


def test_the_core_model_table_has_centred_columns() -> None:
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
