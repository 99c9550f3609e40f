"""Stop requests and batches, from Triton's own clients to a real engine."""

import asyncio

import grpc
import numpy as np
import pytest
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as concurrent
from grpc_stack import ask, request, running, running_coupled, tensor, token_inputs, until
from tiny_engine import build_tiny_engine

from slipstream.repository.templates import write_repository
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.models.stop_requests import StopRequests


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stack(engine_folder, tmp_path):
    async with running(engine_folder, tmp_path) as found:
        yield found


@pytest.fixture
async def coupled(engine_folder, tmp_path):
    async with running_coupled(engine_folder, tmp_path) as found:
        yield found


async def test_a_stop_request_ends_the_request_of_its_id_with_its_tokens_so_far(stack):
    stopping = [*token_inputs([3], 1), tensor("stop", [True], "BOOL")]
    answers = []
    begun = asyncio.Event()

    async def sending():
        yield request("tensorrt_llm", token_inputs([3], 240), id="long")
        await begun.wait()
        yield request("tensorrt_llm", stopping, id="other")  # an unknown id is no error
        yield request("tensorrt_llm", stopping, id="long")

    async with asyncio.timeout(30):
        async for result, error in stack.client.stream_infer(sending()):
            assert error is None
            answers.append(result.get_response())
            begun.set()
    ids = sum(len(answer.raw_output_contents[0]) // 4 for answer in answers if answer.outputs)
    assert 0 < ids < 240
    empty = [
        (answer.id, answer.parameters["triton_final_response"].bool_param)
        for answer in answers
        if not answer.outputs
    ]
    assert empty == [("other", True), ("long", True)]
    await until(lambda: stack.engine.outstanding == 0)


async def test_a_stop_request_without_an_id_ends_requests_without_one_of_its_connection(stack):
    """Upstream's client sends this for `--stop-after-ms` without `--request-id`."""
    stopping = [*token_inputs([3], 1), tensor("stop", [True], "BOOL")]
    long, stop = (
        request("tensorrt_llm", inputs, id="") for inputs in (token_inputs([3], 240), stopping)
    )
    lengths: dict[str, int] = {}
    # clients of one process share a connection without this option
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with concurrent.InferenceServerClient(stack.address, channel_args=own) as other:

        async def read(name, client, *sent):
            begun = asyncio.Event()
            ids = 0

            async def sending():
                for message in sent:
                    yield message
                    await begun.wait()

            async for result, error in client.stream_infer(sending()):
                assert error is None
                ids += result.as_numpy("output_ids").size if result.get_response().outputs else 0
                begun.set()
            lengths[name] = ids

        async with asyncio.timeout(30):
            named = request("tensorrt_llm", token_inputs([3], 240), id="named")
            await asyncio.gather(
                read("stopped", stack.client, long, stop),
                read("other", other, long),
                read("named", stack.client, named),
            )
    assert 0 < lengths["stopped"] < 240
    assert (lengths["other"], lengths["named"]) == (240, 240)
    await until(lambda: stack.engine.outstanding == 0)


async def test_a_call_without_an_id_is_stopped_by_a_call_of_its_connection(coupled):
    """The empty response to the stop request comes first: upstream's client prints the last one."""
    order = []

    async def call(name, inputs):
        answer = await coupled.client.infer("tensorrt_llm", inputs)
        order.append(name)
        return answer

    running = asyncio.create_task(call("stopped", token_inputs([3], 240, False)))
    await until(lambda: coupled.engine.outstanding == 1)
    empty = await call("stop", [*token_inputs([3], 1, False), tensor("stop", [True], "BOOL")])
    assert not empty.get_response().outputs
    ended = await running
    assert 0 < ended.as_numpy("sequence_length")[0, 0] < 240
    assert order == ["stop", "stopped"]


def test_a_stop_request_without_an_id_or_a_connection_is_refused():
    with pytest.raises(
        InferenceError, match="A request id must be provided for request cancellation"
    ):
        StopRequests().stop(InferRequest("tensorrt_llm", "", {}))


async def test_a_stop_request_ends_every_part_of_a_batch(coupled):
    both = batch_of([3, 3], [240, 240], stream=False)
    running = asyncio.create_task(coupled.client.infer("tensorrt_llm", both, request_id="9"))
    await until(lambda: coupled.engine.outstanding == 2)
    await coupled.client.infer(
        "tensorrt_llm", [*token_inputs([3], 1), tensor("stop", [True], "BOOL")], request_id="9"
    )
    ended = await running
    assert (ended.as_numpy("sequence_length") < 240).all()
    await until(lambda: coupled.engine.outstanding == 0)


@pytest.fixture
async def indexed(engine_folder, tmp_path):
    """Run the same repository with the output `batch_index`, which upstream has since 0.12."""
    write_repository(tmp_path / "repo", "chat", engine_folder, engine_folder, 8)
    for model in ("tensorrt_llm", "chat"):
        file = tmp_path / "repo" / model / "config.pbtxt"
        if "batch_index" not in file.read_text():
            added = '\noutput [ { name: "batch_index" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
            file.write_text(file.read_text() + added)
    async with running(engine_folder, tmp_path, keep=True) as found:
        yield found


def batch_of(prompts: list[int], lengths: list[int], stream: bool = True):
    """Return one request with prompts of one token each."""
    rows = {
        "input_ids": prompts,
        "input_lengths": [1] * len(prompts),
        "request_output_len": lengths,
    }
    inputs = []
    for name, values in (*rows.items(), ("streaming", [stream] * len(prompts))):
        kind = "BOOL" if name == "streaming" else "INT32"
        column = np.array(values)[:, None]
        inputs.append(blocking.InferInput(name, list(column.shape), kind))
        inputs[-1].set_data_from_numpy(column.astype(np.bool_ if kind == "BOOL" else np.int32))
    return inputs


@pytest.mark.parametrize("stream", [True, False])
async def test_a_batch_on_a_decoupled_model_is_answered_part_by_part(indexed, stream):
    prompts = [3, 5, 7]
    lengths = [4, 2, 7]
    parts = [
        token_inputs([token], count, stream) for token, count in zip(prompts, lengths, strict=True)
    ]
    expected = [
        np.concatenate(
            [
                result.as_numpy("output_ids")[0, 0]
                for result, _ in await ask(indexed.client, request("tensorrt_llm", part))
            ]
        )
        for part in parts
    ]
    answers = await ask(indexed.client, request("tensorrt_llm", batch_of(prompts, lengths, stream)))
    assert {error for _, error in answers} == {None}
    found = {}
    for result, _ in answers:
        index = result.as_numpy("batch_index")
        assert index.shape == (1, 1)
        found.setdefault(int(index[0, 0]), []).append(result.as_numpy("output_ids")[0, 0])
    assert set(found) == {0, 1, 2}
    assert stream or len(answers) == 3
    for index, ids in found.items():
        assert np.concatenate(ids).tolist() == expected[index].tolist()
    final = [
        result.get_response().parameters["triton_final_response"].bool_param
        for result, _ in answers
    ]
    assert final == [False] * (len(answers) - 1) + [True]
    await until(lambda: indexed.engine.outstanding == 0)


async def test_a_cancelled_batch_is_cancelled_in_the_engine(indexed):
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(
            indexed.client,
            request("tensorrt_llm", batch_of([3, 4], [240, 240])),
            stream_timeout=0.05,
        )
    await until(lambda: indexed.engine.outstanding == 0)


async def test_request_types_of_disaggregated_serving_are_refused(stack):
    asked = request(
        "tensorrt_llm", token_inputs([3], 2), parameters={"request_type": "context_only"}
    )
    ((_, error),) = await ask(stack.client, asked)
    assert error.message().startswith("request_type 'context_only' is not supported by this server")
    whole = request(
        "tensorrt_llm", token_inputs([3], 2), parameters={"request_type": "context_and_generation"}
    )
    assert {error for _, error in await ask(stack.client, whole)} == {None}
