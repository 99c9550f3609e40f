"""Responses of a gRPC stream whose text alone changes: encoded once, with the same content."""

import numpy as np
import pytest

from slipstream.server.grpc.infer_messages import FINAL, NextResponses, set_parameters
from slipstream.server.grpc.infer_messages import write_response as write_message
from slipstream.server.grpc.protocol import messages
from slipstream.server.kserve.call import InferCall, WantedOutput
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensors import Tensor

PARAMETERS = {"sequence_id": 7, "name": "x"}
PLACEHOLDERS = [
    Tensor("cum_log_probs", "FP32", (1, 1), np.zeros(1, "<f4")),
    Tensor("context_logits", "FP32", (1, 1, 1), np.zeros(1, "<f4")),
]


def response(text, shape=(1,), others=PLACEHOLDERS, parameters=PARAMETERS):
    first = Tensor("text_output", "BYTES", shape, [text] * shape[0])
    return InferResponse([first, *others], parameters)


def general(call, answer):
    message = write_message(call, "ensemble", "1", answer, None, SharedMemory())
    set_parameters(message, [(FINAL, False)])
    return message


def pattern(wanted=()):
    call = InferCall(InferRequest("ensemble", "1", {}, id="abc"), list(wanted))
    following = NextResponses()
    first = response(b"first")
    following.remember(call, first, general(call, first))
    return call, following


@pytest.mark.parametrize("size", [0, 1, 20, 127, 128, 300, 16_383, 70_000])
def test_next_response_has_the_content_of_the_general_way(size):
    call, following = pattern()
    answer = response(b"\xc3\xa4" * (size // 2) + b"e" * (size % 2))
    found = messages.ModelStreamInferResponse.FromString(following.write(answer))
    assert found.infer_response == general(call, answer)
    assert found.error_message == ""


@pytest.mark.parametrize(
    "changed",
    [
        response(b"", shape=(2,)),
        response(b"a", others=PLACEHOLDERS[:1]),
        response(b"a", others=[PLACEHOLDERS[0], PLACEHOLDERS[0]]),
        response(b"a", parameters={"sequence_id": 8, "name": "x"}),
    ],
)
def test_response_that_differs_in_more_than_its_text_is_written_the_general_way(changed):
    _, following = pattern()
    assert following.write(changed) is None


def test_response_with_selected_outputs_is_written_the_general_way():
    _, following = pattern([WantedOutput("cum_log_probs")])
    assert following.write(response(b"a")) is None


def test_first_response_is_written_the_general_way():
    assert NextResponses().write(response(b"a")) is None


def test_a_response_without_outputs_does_not_fit_the_pattern():
    call = InferCall(InferRequest("ensemble", "1", {}, id="abc"), [])
    following = NextResponses()
    first = response(b"first", others=[])
    following.remember(call, first, general(call, first))
    assert following.write(response(b"second", others=[])) is not None
    assert following.write(InferResponse([], PARAMETERS)) is None
