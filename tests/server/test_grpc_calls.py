"""The gRPC calls besides inference, and options, access and TLS, with Triton's own clients."""

import asyncio
import re
import threading

import grpc
import pytest
import tritonclient.grpc as blocking
from certificates import NEEDS_OPENSSL, make_certificate
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_stack import (
    ask,
    request,
    running,
    running_coupled,
    tensor,
    text_inputs,
    token_inputs,
    until,
)
from tiny_engine import build_tiny_engine
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.protocol import compile_proto, messages
from slipstream.server.grpc.standard_services import ReflectionRequest, ReflectionResponse
from slipstream.server.kserve.access import Access
from slipstream.server.log.output import HANDLER
from slipstream.server.services import create_context

SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


# The fixture `stack` on both transports; elsewhere it is on the default one.
ON_BOTH = pytest.mark.parametrize("stack", ["core", "aio"], indirect=True)
TRANSPORTS = pytest.mark.parametrize("transport", ["core", "aio"])


@pytest.fixture
async def stack(request, engine_folder, tmp_path):
    options = GrpcOptions(transport=getattr(request, "param", "core"))
    async with running(engine_folder, tmp_path, options=options) as found:
        yield found


def preprocessing_inputs(prompt="3 4"):
    return [tensor("QUERY", [prompt.encode()], "BYTES"), tensor("REQUEST_OUTPUT_LEN", [2], "INT32")]


async def test_model_config(stack):
    config = (await stack.client.get_model_config("tensorrt_llm")).config
    assert (config.name, config.max_batch_size, config.model_transaction_policy.decoupled) == (
        "tensorrt_llm",
        8,
        True,
    )
    kinds = {
        found.name: (found.data_type, list(found.dims), found.optional) for found in config.input
    }
    assert kinds["input_ids"] == (model_config_pb2.TYPE_INT32, [-1], False)
    assert kinds["temperature"][2] is True
    ensemble = (await stack.client.get_model_config("ensemble")).config
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == [
        "preprocessing",
        "tensorrt_llm",
        "postprocessing",
    ]
    with pytest.raises(
        InferenceServerException, match="Request for unknown model: 'nope' is not found"
    ):
        await stack.client.get_model_config("nope")


async def test_log_settings(stack):
    before = await stack.client.get_log_settings(as_json=True)
    assert before["settings"]["log_verbose_level"] == {"uint32_param": 0}
    try:
        changed = await stack.client.update_log_settings(
            {"log_verbose_level": 2, "log_info": False}, as_json=True
        )
        assert changed["settings"]["log_verbose_level"] == {"uint32_param": 2}
        assert changed["settings"]["log_info"] == {"bool_param": False}
        assert HANDLER.settings.verbose_level == 2
    finally:
        await stack.client.update_log_settings({"log_verbose_level": 0, "log_info": True})
    with pytest.raises(InferenceServerException, match="log file location can not be updated"):
        await stack.client.update_log_settings({"log_file": "x"})


async def test_trace_settings(stack):
    found = await stack.client.update_trace_settings("chat", {"trace_rate": "10"}, as_json=True)
    assert found["settings"]["trace_rate"] == {"value": ["10"]}
    assert (await stack.client.get_trace_settings(as_json=True))["settings"]["trace_rate"] == {
        "value": ["1000"]
    }
    cleared = await stack.client.update_trace_settings("chat", {"trace_rate": None}, as_json=True)
    assert cleared["settings"]["trace_rate"] == {"value": ["1000"]}


async def test_repository_and_shared_memory_calls_without_permission_are_refused(stack):
    with pytest.raises(
        InferenceServerException, match="explicit model load / unload is not allowed"
    ):
        await stack.client.load_model("chat")
    with pytest.raises(
        InferenceServerException, match="explicit model load / unload is not allowed"
    ):
        await stack.client.unload_model("chat")
    assert (await stack.client.get_system_shared_memory_status(as_json=True)) == {}
    assert (await stack.client.get_cuda_shared_memory_status(as_json=True)) == {}
    with pytest.raises(
        InferenceServerException, match="shared memory registration is not allowed"
    ) as raised:
        await stack.client.register_system_shared_memory("r", "/r", 8)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


async def test_the_blocking_client(stack):
    def talk():
        with blocking.InferenceServerClient(stack.address) as client:
            assert client.is_server_ready()
            assert client.is_model_ready("chat")
            once = client.infer("preprocessing", preprocessing_inputs(), request_id="a")
            arrived = threading.Event()
            later = []
            client.async_infer(
                "preprocessing",
                preprocessing_inputs("5"),
                lambda result, error: (later.append(result), arrived.set()),
            )
            assert arrived.wait(20)
            return once.as_numpy("INPUT_ID").tolist(), later[0].as_numpy("INPUT_ID").tolist()

    assert await asyncio.to_thread(talk) == ([[3, 4]], [[5]])


@ON_BOTH
async def test_streamed_text_whole_text_and_tokens_agree(stack):
    streamed = await ask(stack.client, request("ensemble", text_inputs("3 4 5", 6)))
    whole = await ask(stack.client, request("ensemble", text_inputs("3 4 5", 6, stream=False)))
    tokens = await ask(stack.client, request("tensorrt_llm", token_inputs([3, 4, 5], 6)))
    text = b"".join(result.as_numpy("text_output")[0] for result, _ in streamed)
    ids = [
        token for result, _ in tokens for token in result.as_numpy("output_ids").ravel().tolist()
    ]
    assert (len(whole), len(ids)) == (1, 6)
    assert text.split() == whole[0][0].as_numpy("text_output")[0].split()
    assert text.split() == [str(token).encode() for token in ids]


async def test_compression_both_ways(engine_folder, tmp_path):
    async with running(
        engine_folder, tmp_path, options=GrpcOptions(response_compression="gzip")
    ) as stack:
        for algorithm in ("gzip", "deflate"):
            result = await stack.client.infer(
                "preprocessing", preprocessing_inputs(), compression_algorithm=algorithm
            )
            assert result.as_numpy("INPUT_ID").tolist() == [[3, 4]]
        answers = await ask(
            stack.client,
            request("tensorrt_llm", token_inputs([3], 3)),
            compression_algorithm="gzip",
        )
        assert sum(result.as_numpy("output_ids").size for result, _ in answers) == 3


@TRANSPORTS
async def test_a_request_above_the_limit_is_refused(engine_folder, tmp_path, transport):
    options = GrpcOptions(largest_request_bytes=20_000, transport=transport)
    async with running(engine_folder, tmp_path, options=options) as stack:
        with pytest.raises(InferenceServerException) as raised:
            await stack.client.infer("preprocessing", preprocessing_inputs("3 " * 20_000))
        assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        result = await stack.client.infer("preprocessing", preprocessing_inputs())
        assert result.as_numpy("INPUT_ID").tolist() == [[3, 4]]


@ON_BOTH
async def test_errors_end_a_stream_for_clients_that_ask_for_it(stack):
    wrong = request("nope", token_inputs([3], 2))
    right = request("tensorrt_llm", token_inputs([3], 2))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(stack.client, wrong, headers={"triton_grpc_error": "true"})
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "Request for unknown model: 'nope' is not found"
    failing = request("tensorrt_llm", token_inputs([3], 0))
    with pytest.raises(grpc.aio.AioRpcError) as raised:  # an error from the model
        await ask(stack.client, failing, headers={"triton_grpc_error": "true"})
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    answers = await ask(stack.client, right, headers={"triton_grpc_error": "true"})
    assert {error for _, error in answers} == {None}
    answers = await ask(stack.client, wrong, right)  # without the header the stream continues
    assert answers[0][1].message() == "Request for unknown model: 'nope' is not found"
    assert sum(result.as_numpy("output_ids").size for result, _ in answers[1:]) == 2


@ON_BOTH
async def test_an_exceeded_deadline_cancels_the_request_in_the_engine(stack):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(
            stack.client, request("tensorrt_llm", token_inputs([3], 240)), stream_timeout=0.02
        )
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: stack.engine.outstanding == 0)
    await until(lambda: stack.engine.stats.cancelled == 1)


@pytest.fixture
async def coupled(engine_folder, tmp_path):
    async with running_coupled(engine_folder, tmp_path) as found:
        yield found


async def test_a_cancelled_unary_call_is_cancelled_in_the_engine(coupled):
    call = asyncio.create_task(coupled.client.infer("chat", text_inputs("3", 240, stream=False)))
    await until(lambda: coupled.engine.outstanding == 1)
    call.cancel()
    await until(lambda: coupled.engine.outstanding == 0)
    await until(lambda: coupled.engine.stats.cancelled == 1)
    with pytest.raises(InferenceServerException) as raised:
        await coupled.client.infer("chat", text_inputs("3", 240, stream=False), client_timeout=0.02)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    await until(lambda: coupled.engine.outstanding == 0)
    result = await coupled.client.infer("chat", text_inputs("3", 2, stream=False))
    assert len(result.as_numpy("text_output")[0].split()) == 2


def unary(address, path, data=b"", **options):
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary(path)(data, timeout=20, **options)


CALLS = [method.name for method in messages.POOL.FindServiceByName(messages.SERVICE).methods]
ADMIN = {name for name in CALLS if re.match("Repository|SystemShared|CudaShared|Trace|Log", name)}


async def code_of(address, path, **options):
    def call():
        with grpc.insecure_channel(address) as channel:
            if path.endswith(("ModelStreamInfer", "Info")):
                return list(channel.stream_stream(path)(iter([]), timeout=20, **options))
            return channel.unary_unary(path)(b"", timeout=20, **options)

    try:
        await asyncio.to_thread(call)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


async def test_every_call_requires_its_key(engine_folder, tmp_path):
    shared = create_context(access=Access(api_key="k1", admin_key="k2", health_needs_key=True))
    async with running(engine_folder, tmp_path, shared) as stack:
        others = [
            "/grpc.health.v1.Health/Check",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ]
        for path in [SERVICE + name for name in CALLS] + others:
            assert await code_of(stack.address, path) == "UNAUTHENTICATED", path
            wrong = [("authorization", "Bearer wrong")]
            assert await code_of(stack.address, path, metadata=wrong) in (
                "UNAUTHENTICATED",
                "PERMISSION_DENIED",
            ), path
            user = await code_of(stack.address, path, metadata=[("authorization", "Bearer k1")])
            assert (user == "PERMISSION_DENIED") == (path.removeprefix(SERVICE) in ADMIN), (
                path,
                user,
            )
            admin = await code_of(stack.address, path, metadata=[("x-api-key", "k2")])
            assert admin not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), path
        assert await stack.client.is_server_live(headers={"authorization": "Bearer k1"})


@TRANSPORTS
async def test_forwarded_metadata_becomes_parameters(
    engine_folder, tmp_path, monkeypatch, transport
):
    seen = []
    shared = create_context(grpc_forwarded_headers=re.compile("x-tenant.*"))
    options = GrpcOptions(transport=transport)
    async with running(engine_folder, tmp_path, shared, options) as stack:
        model = stack.registry.find("preprocessing").model
        infer = model.infer
        monkeypatch.setattr(
            model, "infer", lambda given: seen.append(given.parameters) or infer(given)
        )
        await stack.client.infer(
            "preprocessing", preprocessing_inputs(), headers={"x-tenant-id": "7", "other": "8"}
        )
    assert seen == [{"x-tenant-id": "7"}]


def test_options_become_channel_arguments():
    options = GrpcOptions(
        keepalive_time_ms=1000, max_connection_age_ms=5000, max_connection_age_grace_ms=7
    )
    arguments = dict(options.channel_arguments())
    assert arguments["grpc.keepalive_time_ms"] == 1000
    assert (
        arguments["grpc.max_connection_age_ms"],
        arguments["grpc.max_connection_age_grace_ms"],
    ) == (5000, 7)
    assert "grpc.max_connection_age_ms" not in dict(GrpcOptions().channel_arguments())


@pytest.mark.parametrize(
    "options",
    [
        {"server_key": "k"},
        {"server_certificate": "c"},
        {"root_certificate": "r"},
        {"transport": "x"},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError):
        GrpcOptions(**options)


@NEEDS_OPENSSL
@pytest.mark.parametrize(("mutual", "transport"), [(False, "core"), (True, "core"), (True, "aio")])
async def test_tls(engine_folder, tmp_path, mutual, transport):
    chain, key = make_certificate(tmp_path, "server")
    client_chain, client_key = make_certificate(tmp_path, "client")
    options = GrpcOptions(
        server_key=key,
        server_certificate=chain,
        root_certificate=client_chain if mutual else None,
        transport=transport,
    )
    shown = (client_key.read_bytes(), client_chain.read_bytes()) if mutual else (None, None)
    async with running(engine_folder, tmp_path, options=options) as stack:
        address = "localhost:" + stack.address.rpartition(":")[2]

        def live(key, chain_of_client, root):
            credentials = grpc.ssl_channel_credentials(root, key, chain_of_client)
            with grpc.secure_channel(address, credentials) as channel:
                return channel.unary_unary(SERVICE + "ServerLive")(b"", timeout=10)

        assert await asyncio.to_thread(live, *shown, chain.read_bytes()) == b"\x08\x01"
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(unary, stack.address, SERVICE + "ServerLive")
        if mutual:
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(live, None, None, chain.read_bytes())
        for old, new in zip((chain, key), make_certificate(tmp_path, "renewed"), strict=True):
            new.replace(old)
        assert await asyncio.to_thread(live, *shown, chain.read_bytes()) == b"\x08\x01"


@ON_BOTH
async def test_the_health_service_reports_changes(stack):
    def status():
        with grpc.insecure_channel(stack.address) as channel:
            watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
            first = next(watching)
            stack.state.draining = True
            # the stream ends, so that a watcher does not delay the shutdown
            return [first, *watching]

    assert (
        await asyncio.to_thread(unary, stack.address, "/grpc.health.v1.Health/Check") == b"\x08\x01"
    )
    assert await asyncio.to_thread(status) == [b"\x08\x01", b"\x08\x02"]


def reflected(address, version, **asked):
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    with grpc.insecure_channel(address) as channel:
        question = ReflectionRequest(**asked)
        call = channel.stream_stream(
            path, lambda m: m.SerializeToString(), ReflectionResponse.FromString
        )
        return next(call(iter([question]), timeout=20))


@ON_BOTH
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(stack, version):
    listed = await asyncio.to_thread(reflected, stack.address, version, list_services="*")
    assert [service.name for service in listed.list_services_response.service] == [
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
    ]
    found = await asyncio.to_thread(
        reflected, stack.address, version, file_containing_symbol="inference.GRPCInferenceService"
    )
    pool = descriptor_pool.DescriptorPool()
    files = found.file_descriptor_response.file_descriptor_proto
    for data in reversed(files):
        pool.AddSerializedFile(data)
    assert [
        method.name for method in pool.FindServiceByName("inference.GRPCInferenceService").methods
    ] == CALLS
    by_name = await asyncio.to_thread(
        reflected, stack.address, version, file_by_filename="model_config.proto"
    )
    assert list(by_name.file_descriptor_response.file_descriptor_proto) == [files[1]]
    unknown = await asyncio.to_thread(
        reflected, stack.address, version, file_containing_symbol="a.B"
    )
    assert unknown.error_response.error_code == 5


def wire(descriptor):
    """Return the names, numbers and types of a file, which determine the wire format."""
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    found = {}

    def visit(path, message):
        for field in message.field:
            found[f"{path}.{message.name}.{field.name}"] = (
                field.number,
                field.type,
                field.label,
                field.type_name,
            )
        for inner in message.nested_type:
            visit(f"{path}.{message.name}", inner)

    for message in file.message_type:
        visit("", message)
    for service in file.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            found[method.name] = (method.input_type, method.output_type, *streams)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("grpc_service.proto", service_pb2), ("model_config.proto", model_config_pb2)],
)
def test_wire_format_equals_that_of_tritons_client(ours, theirs):
    expected = wire(theirs.DESCRIPTOR)
    found = wire(messages.POOL.FindFileByName(ours))
    assert {name: found.get(name) for name in expected if name in found} == {
        name: value for name, value in expected.items() if name in found
    }
    # a later client may know fields that this server does not fill
    assert len(set(expected) - set(found)) < 20


def test_descriptor_modules_are_up_to_date_with_the_proto_files():
    written = compile_proto.compile_proto()
    assert len(written) == 2
    for name, text in written.items():
        assert (compile_proto.HERE / name).read_text() == text, f"run compile_proto for {name}"


def test_descriptors_equal_those_of_protoc():
    for file in compile_proto.read_proto().file:
        found = descriptor_pb2.FileDescriptorProto()
        messages.POOL.FindFileByName(file.name).CopyToProto(found)
        assert found == file


def test_tritons_client_can_be_imported_in_the_same_process():
    ours = messages.ModelInferRequest(model_name="a", id="b")
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert (theirs.model_name, theirs.id) == ("a", "b")
    assert messages.ModelInferRequest.DESCRIPTOR is not service_pb2.ModelInferRequest.DESCRIPTOR
    assert messages.POOL is not descriptor_pool.Default()
