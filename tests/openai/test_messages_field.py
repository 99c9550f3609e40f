"""`messages` in place of `text_input` on Triton's routes: the chat template renders the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from grpc_support import RunningGrpc
from http_support import RunningServer, post
from openai_server import Serving
from optional_tensors import write_declared

from slipstream.repository.config import read_model_config
from slipstream.repository.models import read_repository
from slipstream.repository.problems import Problems
from slipstream.server.http.generate import generate_request
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say something. ö"},
]
OTHER = [{"role": "user", "content": "Say it."}]
TOKENS = 12


@pytest.fixture(scope="module")
def coupled(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    """Serve the same engine with models that are not decoupled, as `infer` needs them."""
    folder = tmp_path_factory.mktemp("coupled")
    engine = serving.model_folder.parent / "engine"
    repository = write_declared(folder / "repo", engine, decoupled_mode="false")
    return build_registry(read_repository(repository), {"tensorrt_llm": serving.generator})


@pytest.fixture(scope="module")
def http(serving: Serving, coupled: ModelRegistry) -> Iterator[http_client.InferenceServerClient]:
    with RunningServer(create_app(coupled, ServerState([serving.engine]))) as server:
        client = http_client.InferenceServerClient(f"127.0.0.1:{server.port}")
        yield client
        client.close()


def chat(serving: Serving, messages: Any = CONVERSATION, **fields: Any) -> Any:
    return serving.client.chat.completions.create(
        model="chat", messages=messages, temperature=0, max_tokens=TOKENS, logprobs=True, **fields
    )


def score(answer: Any) -> Any:
    """The mean log-probability of a token, which tells prompts apart whose likeliest answer is the
    same.
    """
    return pytest.approx(
        sum(entry.logprob for entry in answer.choices[0].logprobs.content) / TOKENS, rel=1e-3
    )


def generate(port: int, model: str = "chat", route: str = "generate", **fields: Any) -> Any:
    body = {
        "max_tokens": TOKENS,
        "return_log_probs": True,
        "return_num_input_tokens": True,
        **fields,
    }
    return post(port, f"/v2/models/{model}/{route}", json.dumps(body).encode())


def template_ids(serving: Serving, messages: Any) -> list[int]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.model_folder)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("model", ["chat", "ensemble"])
@pytest.mark.parametrize("form", ["list", "text", "text in a list", "in parameters"])
def test_generate_with_messages_equals_the_chat_route(
    serving: Serving, model: str, form: str
) -> None:
    text = json.dumps(CONVERSATION)
    given = {
        "list": {"messages": CONVERSATION},
        "text": {"messages": text},
        "text in a list": {"messages": [text]},
        "in parameters": {"parameters": {"messages": CONVERSATION}},
    }[form]
    answer = generate(serving.port, model, **given)
    assert answer.status == 200, answer.body
    document, expected = json.loads(answer.body), chat(serving)
    assert document["text_output"] == expected.choices[0].message.content
    assert document["cum_log_probs"] == score(expected)
    assert (
        document["num_input_tokens"]
        == len(template_ids(serving, CONVERSATION))
        == expected.usage.prompt_tokens
    )


def test_streamed_pieces_equal_the_whole_text(serving: Serving) -> None:
    answer = generate(serving.port, route="generate_stream", messages=CONVERSATION, stream=True)
    events = [
        json.loads(event.removeprefix(b"data: ")) for event in answer.body.split(b"\n\n") if event
    ]
    assert (
        "".join(event["text_output"] for event in events)
        == chat(serving).choices[0].message.content
    )


def test_contents_may_be_parts_and_a_key_may_be_null(serving: Serving) -> None:
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "it."}],
            "name": None,
        }
    ]
    document = json.loads(generate(serving.port, messages=parts).body)
    assert document["cum_log_probs"] == score(chat(serving, parts))


@pytest.mark.parametrize("model", ["chat", "ensemble"])
def test_infer_takes_a_tensor_of_json_and_a_batch_of_them(
    serving: Serving, http: http_client.InferenceServerClient, model: str
) -> None:
    rows = [[json.dumps(CONVERSATION).encode()], [json.dumps(OTHER).encode()]]
    answer = http.infer(model, inputs(http_client, rows))
    expected = [chat(serving, messages) for messages in (CONVERSATION, OTHER)]
    texts = [row[0].decode() for row in answer.as_numpy("text_output").reshape(2, 1)]
    assert texts == [one.choices[0].message.content for one in expected]
    assert answer.as_numpy("cum_log_probs").reshape(-1).tolist() == [score(one) for one in expected]


def test_grpc_takes_messages_whole_and_streamed(serving: Serving, coupled: ModelRegistry) -> None:
    expected = chat(serving).choices[0].message.content
    given = inputs(grpc_client, [[json.dumps(CONVERSATION).encode()]])
    with RunningGrpc(coupled, ServerState([serving.engine])) as server:
        client = grpc_client.InferenceServerClient(f"127.0.0.1:{server.port}")
        assert (
            client.infer("ensemble", given).as_numpy("text_output").reshape(-1)[0].decode()
            == expected
        )
        client.close()
    with RunningGrpc(serving.registry, ServerState([serving.engine])) as server:
        client = grpc_client.InferenceServerClient(f"127.0.0.1:{server.port}")
        pieces: list[Any] = []
        client.start_stream(lambda result, error: pieces.append(error or result))
        client.async_stream_infer("chat", given)
        client.stop_stream()
        client.close()
    assert (
        "".join(piece.as_numpy("text_output").reshape(-1)[0].decode() for piece in pieces)
        == expected
    )


def inputs(module: Any, rows: list[list[bytes]]) -> list[Any]:
    given = [
        module.InferInput("messages", [len(rows), 1], "BYTES"),
        module.InferInput("max_tokens", [len(rows), 1], "INT32"),
        module.InferInput("return_log_probs", [len(rows), 1], "BOOL"),
    ]
    for tensor, value in zip(
        given, (rows, [[TOKENS]] * len(rows), [[True]] * len(rows)), strict=True
    ):
        kinds = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}
        tensor.set_data_from_numpy(np.array(value, kinds[tensor.datatype()]))
    return given


def test_preprocessing_returns_the_templates_tokens_with_one_bos(
    serving: Serving, http: http_client.InferenceServerClient
) -> None:
    given = [
        http_client.InferInput("MESSAGES", [1, 1], "BYTES"),
        http_client.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32"),
    ]
    given[0].set_data_from_numpy(np.array([[json.dumps(CONVERSATION).encode()]], np.object_))
    given[1].set_data_from_numpy(np.array([[TOKENS]], np.int32))
    ids = http.infer("preprocessing", given).as_numpy("INPUT_ID").reshape(-1).tolist()
    assert ids == template_ids(serving, CONVERSATION)
    assert ids.count(serving.generator.tokenizer.bos_id) == 1


def test_output_with_the_input_begins_with_the_rendered_conversation(
    serving: Serving,
) -> None:
    document = json.loads(
        generate(serving.port, messages=OTHER, exclude_input_in_output=False).body
    )
    reported = chat(serving, OTHER).choices[0].message.content
    assert document["text_output"] == "[user] Say it.\n[assistant] " + reported


BAD = {
    "both": (
        {"text_input": "a", "messages": OTHER},
        "text_input and messages cannot be given together: send one",
    ),
    "neither": ({"temperature": 0.0}, "text_input or messages is required"),
    "no JSON": (
        {"messages": "Hello"},
        'messages must be a JSON list of messages, such as [{"role": "user", "content": '
        '"Hello"}]; it is not valid JSON: ',
    ),
    "no list": ({"messages": OTHER[0]}, "messages must be a JSON list of messages, such as ["),
    "a number": ({"messages": 5}, "messages must be a JSON list of messages, such as ["),
    "null": ({"messages": None}, "messages must be a JSON list of messages, such as ["),
    "empty list": ({"messages": []}, "messages must hold at least one message"),
    "two texts": ({"messages": ["[]", "[]"]}, "[request id: <id_unknown>] input '"),
    "no object": ({"messages": [1]}, "messages[0] must be an object with role and content"),
    "bad role": (
        {"messages": [*OTHER, {"role": "king", "content": "a"}]},
        'messages[1].role must be one of system, developer, user, assistant, tool, got "king"',
    ),
    "no content": (
        {"messages": [{"role": "user"}]},
        "messages[0].content must be a string or a list of text parts",
    ),
    "unknown key": (
        {"messages": [{**OTHER[0], "weight": 1}]},
        "messages[0].weight is not known: a message has role, ",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        'messages[0].content[0].type must be text, got "image_url"',
    ),
    "too long": (
        {"messages": [{"role": "user", "content": "a" * 600}]},
        "Prompt length (621) exceeds maximum input",
    ),
    "far too long": (
        {"messages": [{"role": "user", "content": "a" * 200_000}]},
        "Prompt length (over 5",
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_an_error_in_a_message_names_its_position(serving: Serving, what: str, route: str) -> None:
    given, text = BAD[what]
    answer = generate(serving.port, "chat", route, **given)
    error = json.loads(answer.body.removeprefix(b"data: "))["error"]
    assert answer.status == 400
    assert error.startswith(text), error


def test_a_missing_prompt_is_named_by_the_models_inputs(serving: Serving) -> None:
    for given, missing in (
        ({"messages": OTHER}, "'max_tokens'"),
        ({"max_tokens": 4}, "'text_input' or 'messages'"),
    ):
        answer = post(serving.port, "/v2/models/chat/generate", json.dumps(given).encode())
        assert answer.status == 400
        assert f"missing required input(s) [{missing}]." in json.loads(answer.body)["error"]


def test_the_engine_model_refuses_a_conversation(serving: Serving, tmp_path: Path) -> None:
    repository = write_declared(tmp_path / "repo", serving.model_folder.parent / "engine")
    config = repository / "tensorrt_llm" / "config.pbtxt"
    declared = '{ name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true },'
    config.write_text(config.read_text().replace("input [\n", f"input [\n{declared}\n", 1))
    registry = build_registry(read_repository(repository), {"tensorrt_llm": serving.generator})
    with RunningServer(create_app(registry, ServerState([serving.engine]))) as server:
        body = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 4, "messages": OTHER}
        answer = post(server.port, "/v2/models/tensorrt_llm/generate", json.dumps(body).encode())
    assert (
        json.loads(answer.body)["error"]
        == "messages is for models that take text, and tensorrt_llm takes input_ids"
    )


@pytest.mark.parametrize("value", [OTHER, json.dumps(OTHER)])
def test_a_model_without_a_messages_input_says_how_to_declare_it(
    serving: Serving, tmp_path: Path, value: Any
) -> None:
    repository = write_declared(tmp_path / "repo", serving.model_folder.parent / "engine")
    config = repository / "chat" / "config.pbtxt"
    config.write_text(
        "".join(line for line in config.read_text().splitlines(True) if '"messages"' not in line)
    )
    registry = build_registry(read_repository(repository), {"tensorrt_llm": serving.generator})
    with RunningServer(create_app(registry, ServerState([serving.engine]))) as server:
        assert "messages" not in {tensor["name"] for tensor in registry.metadata("chat")["inputs"]}
        answer = generate(server.port, text_input="a", messages=value)
    assert answer.status == 400
    assert json.loads(answer.body)["error"].endswith(
        'A conversation is taken by models whose config.pbtxt declares the input { name: "messages" data_type: '
        "TYPE_STRING dims: [ 1 ] optional: true }."
    )


def test_a_numeric_input_named_messages_is_not_a_conversation(tmp_path: Path) -> None:
    declared = {"name": "messages", "data_type": "TYPE_INT32", "dims": [-1]}
    config = read_model_config(tmp_path / "mine", Problems(), {"name": "mine", "input": [declared]})
    request = generate_request(b'{"messages": [3, 4]}', config, "1")
    assert (request.inputs["messages"].datatype, request.inputs["messages"].values()) == (
        "INT32",
        [3, 4],
    )


def test_a_model_without_a_chat_template_says_where_to_put_one(
    serving: Serving, tmp_path: Path
) -> None:
    """The same engine, cut up by a tokenizer whose folder has none."""
    from slipstream.server.text.pipeline import TextGenerator
    from slipstream.server.text.tokenizer import Tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((serving.model_folder / name).read_bytes())
    repository = write_declared(tmp_path / "repo", serving.model_folder.parent / "engine")
    generator = TextGenerator(Tokenizer.load(tmp_path), serving.engine)
    registry = build_registry(read_repository(repository), {"tensorrt_llm": generator})
    with RunningServer(create_app(registry, ServerState([serving.engine]))) as server:
        answer = generate(server.port, messages=OTHER)
    assert answer.status == 400
    assert json.loads(answer.body)["error"].startswith(
        "messages: this model has no chat template; put one into its "
    )


def test_openapi_document_has_the_messages_field(serving: Serving) -> None:
    import httpx

    document = httpx.get(f"http://127.0.0.1:{serving.port}/openapi.json", trust_env=False).json()
    schema = document["paths"]["/v2/models/{model}/generate"]["post"]["requestBody"]["content"][
        "application/json"
    ]
    assert schema["schema"]["properties"]["messages"] == {
        "type": ["array", "string"],
        "items": {"type": "object"},
    }
    assert schema["schema"]["required"] == ["max_tokens"]
