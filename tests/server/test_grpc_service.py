"""The gRPC service, called by Triton's own client."""

import asyncio
import re
import struct
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as triton
from scripted_engine import ScriptedLoop
from tiny_server import MODEL, make_repository
from tritonclient.utils import InferenceServerException

from slipstream.repository.models import read_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.kserve.health import ServerState
from slipstream.server.models.build import build_registry
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer

FINAL = "triton_final_response"


# The fixture `served` on both transports; elsewhere it is on the default one.
ON_BOTH = pytest.mark.parametrize("served", ["core", "aio"], indirect=True)


@asynccontextmanager
async def serving(repository_folder, transport="core"):
    repository = read_repository(repository_folder)
    model = repository.engines["tensorrt_llm"]
    loop = ScriptedLoop()
    engine = InProcessEngine(loop)
    state = ServerState([engine])
    registry = build_registry(
        repository, {"tensorrt_llm": TextGenerator(Tokenizer.load(model.tokenizer_folder), engine)}
    )
    server = create_grpc_server(registry, state, options=GrpcOptions(transport=transport))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = triton.InferenceServerClient(address)
    try:
        yield SimpleNamespace(client=client, address=address, loop=loop, engine=engine, state=state)
    finally:
        await client.close()
        await server.stop(None)
        engine.close()


@pytest.fixture
async def served(request, tmp_path):
    transport = getattr(request, "param", "core")
    async with serving(make_repository(tmp_path), transport) as everything:
        yield everything


@pytest.fixture
async def coupled(tmp_path):
    """The same repository without streaming."""
    repository = make_repository(tmp_path)
    for file in repository.glob("*/config.pbtxt"):
        file.write_text(re.sub(r"decoupled: \w+", "decoupled: false", file.read_text()))
    async with serving(repository) as everything:
        yield everything


def tensor(name, values, datatype):
    array = np.array([values], dtype=object if datatype == "BYTES" else None)
    kinds = {"INT32": np.int32, "BOOL": np.bool_, "UINT64": np.uint64, "FP32": np.float32}
    array = array.astype(kinds[datatype]) if datatype in kinds else array
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def text_inputs(prompt="5", max_tokens=3, stream=True, milliseconds=0):
    return [
        tensor("text_input", [prompt.encode()], "BYTES"),
        tensor("max_tokens", [max_tokens], "INT32"),
        tensor("stream", [stream], "BOOL"),
        tensor("random_seed", [milliseconds], "UINT64"),
    ]


def token_inputs(ids, count, stream=True):
    return [
        tensor("input_ids", ids, "INT32"),
        tensor("input_lengths", [len(ids)], "INT32"),
        tensor("request_output_len", [count], "INT32"),
        tensor("streaming", [stream], "BOOL"),
    ]


async def ask(client, *requests):
    """Send requests on one stream; return (ModelInferResponse or None, error, result) of each."""

    async def sending():
        for request in requests:
            yield request

    answers = []
    async with asyncio.timeout(30):
        async for result, error in client.stream_infer(sending()):
            answers.append((result.get_response() if result else None, error, result))
    return answers


async def ask_blocking(address, model, inputs, empty_final):
    """Use the blocking client, which alone can request an empty final response."""

    def talk():
        answers = []
        with blocking.InferenceServerClient(address) as client:
            client.start_stream(
                lambda result, error: answers.append(
                    (result and result.get_response(), error, result)
                )
            )
            client.async_stream_infer(
                model, inputs, request_id="t", enable_empty_final_response=empty_final
            )
            client.stop_stream()  # returns when all answers are in
        return answers

    return await asyncio.to_thread(talk)


def request(model, inputs, id="1", **more):
    return {"model_name": model, "inputs": inputs, "request_id": id, **more}


def finals(answers):
    return [response.parameters[FINAL].bool_param for response, _, _ in answers]


def texts(answers):
    return b"".join(
        r.as_numpy("text_output")[0] for response, _, r in answers if response.outputs
    ).decode()


@ON_BOTH
async def test_health_and_metadata(served):
    client = served.client
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready(MODEL)
    assert not await client.is_model_ready("nope")
    assert (await client.get_server_metadata()).version == "2.51.0"
    metadata = await client.get_model_metadata("tensorrt_llm")
    assert (metadata.name, list(metadata.versions)) == ("tensorrt_llm", ["1"])
    shapes = {found.name: (found.datatype, list(found.shape)) for found in metadata.inputs}
    assert shapes["input_ids"] == ("INT32", [-1, -1])
    served.state.draining = True
    assert not await client.is_server_ready()


@ON_BOTH
async def test_the_standard_health_check(served):
    async with grpc.aio.insecure_channel(served.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x01"
        served.state.draining = True
        assert await check(b"") == b"\x08\x02"


@ON_BOTH
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
async def test_the_last_token_carries_the_final_flag(served, model):
    inputs = token_inputs([5], 3) if model == "tensorrt_llm" else text_inputs()
    for empty in (False, True):
        answers = await ask_blocking(served.address, model, inputs, empty)
        assert finals(answers)[-1] is True
        assert not any(finals(answers)[:-1])
        assert all(response.outputs for response, _, _ in answers)
        assert {
            (response.model_name, response.model_version, response.id) for response, _, _ in answers
        } == {(model, "1", "t")}


async def test_a_bls_model_sends_an_empty_final_response_only_on_request(served):
    plain = await ask_blocking(served.address, MODEL, text_inputs(), False)
    assert not any(finals(plain))
    assert texts(plain) == "6 7 8"
    asked = await ask_blocking(served.address, MODEL, text_inputs(), True)
    assert finals(asked)[-1] is True
    assert not any(finals(asked)[:-1])
    end = asked[-1][0]
    assert (end.model_name, end.model_version, end.id, len(end.outputs)) == (MODEL, "", "t", 0)
    assert texts(asked) == "6 7 8"


async def test_an_ensemble_carries_the_sequence_parameters(served):
    (response, _, _), *_ = await ask(served.client, request("ensemble", text_inputs(stream=False)))
    values = {
        name: value.WhichOneof("parameter_choice") for name, value in response.parameters.items()
    }
    assert values == {
        "sequence_start": "bool_param",
        "sequence_id": "int64_param",
        "sequence_end": "bool_param",
        FINAL: "bool_param",
    }


@ON_BOTH
async def test_token_ids_in_and_out(served):
    answers = await ask(served.client, request("tensorrt_llm", token_inputs([10, 20], 4)))
    ids = [int(i) for _, _, result in answers for i in result.as_numpy("output_ids").ravel()]
    assert ids == [21, 22, 23, 24]
    assert [o.name for o in answers[0][0].outputs][:2] == ["output_ids", "sequence_length"]


async def test_only_requested_outputs_are_returned(served):
    wanted = [triton.InferRequestedOutput("text_output")]
    answers = await ask(served.client, request("ensemble", text_inputs(), outputs=wanted))
    assert {output.name for response, _, _ in answers for output in response.outputs} == {
        "text_output"
    }
    with pytest.raises(
        InferenceServerException, match="unexpected inference output 'x' for model 'preprocessing'"
    ):
        await served.client.infer(
            "preprocessing", preprocessing_inputs(), outputs=[triton.InferRequestedOutput("x")]
        )


def preprocessing_inputs():
    return [tensor("QUERY", [b"3 4"], "BYTES"), tensor("REQUEST_OUTPUT_LEN", [4], "INT32")]


@ON_BOTH
async def test_unary_infer_of_a_model_that_answers_once(served):
    result = await served.client.infer("preprocessing", preprocessing_inputs(), request_id="p")
    assert result.as_numpy("INPUT_ID").tolist() == [[3, 4]]
    assert (result.get_response().id, result.get_response().model_version) == ("p", "1")


async def test_unary_infer_of_a_text_model_without_streaming(coupled):
    result = await coupled.client.infer(MODEL, text_inputs(stream=False))
    assert result.as_numpy("text_output").tolist() == [b"6 7 8"]
    answers = await ask(coupled.client, request(MODEL, text_inputs(stream=False)))
    assert finals(answers) == [True]


async def test_models_that_answer_once_keep_the_order_of_a_stream(coupled):
    slow = text_inputs("1", 10, False, 20)
    quick = text_inputs("50", 1, False)
    answers = await ask(coupled.client, request(MODEL, slow, "a"), request(MODEL, quick, "b"))
    assert [response.id for response, _, _ in answers] == ["a", "b"]


@ON_BOTH
@pytest.mark.parametrize(
    ("model", "inputs", "more", "code", "text"),
    [
        (
            MODEL,
            text_inputs(),
            {},
            "UNIMPLEMENTED",
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        ("nope", text_inputs(), {}, "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
        (
            "preprocessing",
            [],
            {"model_version": "9"},
            "NOT_FOUND",
            "Request for unknown model: 'preprocessing' version 9 is not found",
        ),
        (
            "preprocessing",
            [],
            {"model_version": "abc"},
            "INVALID_ARGUMENT",
            "failed to get model version from specified version string 'abc' (details: stol), "
            "version should be an integral value > 0",
        ),
        (
            "preprocessing",
            [tensor("QUERY", [b"3"], "BYTES"), tensor("REQUEST_OUTPUT_LEN", [1.5], "FP32")],
            {},
            "INVALID_ARGUMENT",
            "[request id: <id_unknown>] inference input 'REQUEST_OUTPUT_LEN' data-type is 'FP32', "
            "but model 'preprocessing' expects 'INT32'",
        ),
        (
            "preprocessing",
            [tensor("QUERY", [b"3"], "BYTES"), tensor("WHAT", [1], "INT32")],
            {},
            "INVALID_ARGUMENT",
            "unexpected inference input 'WHAT' for model 'preprocessing'",
        ),
    ],
)
async def test_errors_of_a_unary_call(served, model, inputs, more, code, text):
    with pytest.raises(InferenceServerException) as raised:
        await served.client.infer(model, inputs, **more)
    assert (raised.value.status(), raised.value.message()) == (f"StatusCode.{code}", text)


@ON_BOTH
async def test_errors_in_a_stream_are_responses_and_the_stream_continues(served):
    answers = await ask(
        served.client,
        request("nope", text_inputs(), "e1"),
        request(MODEL, text_inputs("5", 0), "e2"),
        request("ensemble", text_inputs("5"), "ok"),
    )
    by_error = [str(error) for _, error, _ in answers if error is not None]
    assert any("Request for unknown model: 'nope' is not found" in text for text in by_error)
    assert any("max_tokens" in text for text in by_error)
    assert len(by_error) == 2
    good = [answer for answer in answers if answer[1] is None]
    assert texts(good) == "6 7 8"


async def raw_stream(served, *requests):
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = channel.stream_stream(
            f"/{messages.SERVICE}/ModelStreamInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelStreamInferResponse.FromString,
        )
        return [answer async for answer in call(iter(requests))]


async def test_error_of_a_refused_request_has_its_id_and_of_a_failed_one_its_model(served):
    refused = messages.ModelInferRequest(model_name="nope", id="a")
    failed = messages.ModelInferRequest(model_name="tensorrt_llm", id="b")
    for name, value in (("input_ids", 903), ("input_lengths", 1), ("request_output_len", 2)):
        failed.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        failed.raw_input_contents.append(struct.pack("<i", value))
    first, second = await raw_stream(served, refused, failed)
    assert (first.infer_response.id, first.infer_response.model_name) == ("a", "")
    assert FINAL not in first.infer_response.parameters
    assert "refused by order" in second.error_message
    assert (second.infer_response.id, second.infer_response.model_name) == ("b", "tensorrt_llm")
    assert second.infer_response.parameters[FINAL].bool_param is True


async def test_typed_contents_equal_raw_ones_and_are_checked(served):
    async with grpc.aio.insecure_channel(served.address) as channel:
        infer = channel.unary_unary(
            f"/{messages.SERVICE}/ModelInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelInferResponse.FromString,
        )
        given = messages.ModelInferRequest(model_name="preprocessing")
        given.inputs.add(
            name="QUERY", datatype="BYTES", shape=[1, 1]
        ).contents.bytes_contents.append(b"3 4")
        length = given.inputs.add(name="REQUEST_OUTPUT_LEN", datatype="INT32", shape=[1, 1])
        length.contents.int_contents.append(7)
        answer = await infer(given)
        found = dict(
            zip([output.name for output in answer.outputs], answer.raw_output_contents, strict=True)
        )
        assert struct.unpack("<2i", found["INPUT_ID"]) == (3, 4)
        length.contents.Clear()
        length.contents.fp32_contents.append(7.0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await infer(given)
        assert raised.value.details() == (
            "unexpected explicit tensor data for input tensor 'REQUEST_OUTPUT_LEN' for model 'preprocessing' of "
            "type 'FP32', expected datatype 'INT32'"
        )


@pytest.mark.parametrize(
    ("raw", "shape", "text"),
    [
        (b"\x01\x00\x00\x00a", [2, 1], "expected 2 string elements"),
        (b"\xff\x00\x00\x00a", [1, 1], "incomplete string data"),
        (b"\x01\x00", [1, 1], "incomplete string length indicator"),
        (None, [1, 1], "unable to find data for input tensor 'QUERY'"),
    ],
)
async def test_damaged_data_is_refused(served, raw, shape, text):
    given = messages.ModelInferRequest(model_name="preprocessing")
    given.inputs.add(name="QUERY", datatype="BYTES", shape=shape)
    if raw is not None:
        given.inputs.add(name="REQUEST_OUTPUT_LEN", datatype="INT32", shape=shape)
        given.raw_input_contents.extend([raw, bytes(4 * shape[0])])
    (answer,) = await raw_stream(served, given)
    assert text in answer.error_message


async def test_reserved_parameters_are_refused(served):
    given = messages.ModelInferRequest(model_name="preprocessing")
    given.parameters["triton_x"].int64_param = 4
    (answer,) = await raw_stream(served, given)
    assert answer.error_message == (
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
        "with 'triton_' are allowed: triton_enable_empty_final_response"
    )


@ON_BOTH
async def test_a_disconnected_client_cancels_its_requests(served):
    endless = text_inputs("1", 2000, True, 5)

    async def sending():
        yield request(MODEL, endless)
        await asyncio.sleep(30)

    answers = served.client.stream_infer(sending())
    await anext(answers)
    answers.cancel()
    async with asyncio.timeout(30):
        while served.loop.cancelled == 0 or served.loop.running or served.engine.outstanding:
            await asyncio.sleep(0.01)


async def test_new_requests_are_refused_while_draining(served):
    served.state.draining = True
    with pytest.raises(InferenceServerException) as raised:
        await served.client.infer("preprocessing", preprocessing_inputs())
    assert raised.value.status() == "StatusCode.UNAVAILABLE"


@ON_BOTH
async def test_an_unknown_call_is_unimplemented(served):
    async with grpc.aio.insecure_channel(served.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"")
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


@ON_BOTH
async def test_a_request_of_several_megabytes_is_accepted(served):
    given = [
        tensor("QUERY", [b"3 " * (3 << 20)], "BYTES"),
        tensor("REQUEST_OUTPUT_LEN", [4], "INT32"),
    ]
    with pytest.raises(InferenceServerException) as raised:
        await served.client.infer("preprocessing", given)
    # refused by the model's limit, not by gRPC's
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
