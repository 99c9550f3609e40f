"""What reads bytes from outside, as functions that accept an input, refuse it, or fail.

A target returns whether it accepted the input. Any exception that is not a refusal is a failure.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing import REPOSITORIES, TEXT, tensor_body
from google.protobuf.message import DecodeError
from random_schemas import random_schema

from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.messages import Cancel, EngineStats, StepOutputs
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.model.families.family import UnsupportedModel
from slipstream.repository.config import read_model_config
from slipstream.repository.problems import Problems
from slipstream.server.anthropic.fields import read_messages_fields
from slipstream.server.engine_link.link import (
    LinkError,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from slipstream.server.grpc.infer_messages import read_call, write_response
from slipstream.server.grpc.protocol import messages
from slipstream.server.http.generate import generate_request
from slipstream.server.http.infer_request import read_infer_call
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferResponse
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.fields import ChatFields, CompletionFields, read_fields
from slipstream.server.openai.responses.fields import read_response_fields
from slipstream.server.text.sandbox import render
from slipstream.weights.sources.gguf_source import GgufSource
from slipstream.weights.sources.source import SourceError, check_source
from slipstream.weights.tensor_file import TensorFileError, map_tensors, read_header

_MEMORY = Path("/dev/shm")
_CONFIG = """
name: "m" max_batch_size: 4 backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] optional: true },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ -1 ] optional: true },
        { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
        { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] optional: true },
        { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
    "max_tokens": 4,
    "stop": ["a", "b"],
    "logit_bias": {"5": 1.5},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}
_COMPLETION = {"model": "m", "prompt": ["a", "b"], "n": 2, "logprobs": 1, "seed": 5, "echo": True}
_RESPONSE = {
    "model": "m",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
}
_MESSAGE = {
    "model": "m",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "b"}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "stop_sequences": ["c"],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "thinking": {"type": "disabled"},
}
_TEMPLATES = (
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}"
    "{% if not loop.last %}{{ m | tojson }}{% endif %}{% endfor %}{{ ns.x }}",
    "{% macro f(a) %}{{ a.split(' ')[0] ~ '%5d' % 7 }}{% endmacro %}{{ f('a b') }}",
    "{{ raise_exception('no') }}{{ messages | map(attribute='role') | join(', ') }}",
    "{%- if tools %}{{ tools | length }}{% else %}{{ strftime_now('%Y') }}{% endif -%}",
)
_VARIABLES = {
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}],
    "tools": None,
    "add_generation_prompt": True,
}


@dataclass(frozen=True)
class Target:
    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], bool]
    inputs: int  # of the long form


def targets(folder: Path) -> list[Target]:
    """Return all targets. `folder` is for files of their own."""
    return [*_bodies(folder), *_files(folder), *_texts(), *_link()]


def _refusing(read: Callable[[bytes], object], *refusals: type[Exception]) -> Any:
    def accept(data: bytes) -> bool:
        try:
            read(data)
        except refusals:
            return False
        return True

    return accept


def _as_json(*documents: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(document).encode() for document in documents)


def _bodies(folder: Path) -> list[Target]:
    place = folder / "config" / "m"
    place.mkdir(parents=True)
    (place / "config.pbtxt").write_text(_CONFIG)
    problems = Problems()
    config = read_model_config(place, problems)
    assert config is not None
    assert not problems.errors
    memory = SharedMemory()
    tensors = (*[_good_tensors()] * 20, *(_tensors(seed) for seed in range(20)))

    def read_message(data: bytes) -> None:
        call = read_call(messages.ModelInferRequest.FromString(data), config, "1", memory)
        answer = InferResponse(list(call.request.inputs.values()))
        write_response(call, "m", "1", answer, config, memory).SerializeToString()

    def read_infer(data: bytes) -> None:
        # the length of the JSON, which a header of the request has, stands first
        length = int.from_bytes(data[:2], "little")
        read_infer_call(data[2:], length or None, config, "1", memory)

    body = _as_json(TEXT, {"text_input": ["a", "b"], "max_tokens": 3, "parameters": {"a": 1}})
    return [
        Target(
            "generate body",
            body,
            _refusing(lambda data: generate_request(data, config, "1"), InferenceError),
            160_000,
        ),
        Target("infer body", tensors, _refusing(read_infer, InferenceError), 110_000),
        Target(
            "gRPC message",
            _grpc_seeds(),
            _refusing(read_message, InferenceError, DecodeError),
            110_000,
        ),
        Target(
            "chat body",
            _as_json(_CHAT),
            _refusing(lambda data: read_fields(data, ChatFields), ApiError),
            70_000,
        ),
        Target(
            "completion body",
            _as_json(_COMPLETION),
            _refusing(lambda data: read_fields(data, CompletionFields), ApiError),
            70_000,
        ),
        Target(
            "response body", _as_json(_RESPONSE), _refusing(read_response_fields, ApiError), 50_000
        ),
        Target(
            "message body", _as_json(_MESSAGE), _refusing(read_messages_fields, ApiError), 50_000
        ),
    ]


def _good_tensors() -> bytes:
    names = {"input_ids": 3, "input_lengths": 1, "request_output_len": 1}
    inputs = [
        {
            "name": name,
            "datatype": "INT32",
            "shape": [1, count],
            "parameters": {"binary_data_size": 4 * count},
        }
        for name, count in names.items()
    ]
    header = json.dumps({"id": "f", "inputs": inputs}).encode()
    return len(header).to_bytes(2, "little") + header + bytes(range(20))


def _tensors(seed: int) -> bytes:
    body, length = tensor_body(random.Random(seed))
    return max(0, length % 2**16).to_bytes(2, "little") + body


def _grpc_seeds() -> tuple[bytes, ...]:
    message = messages.ModelInferRequest(model_name="m", id="g")
    for name, datatype, raw in (
        ("text_input", "BYTES", b"\x03\0\0\x005 6"),
        ("max_tokens", "INT32", b"\x04\0\0\0"),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        message.raw_input_contents.append(raw)
    typed = messages.ModelInferRequest(model_name="m")
    typed.inputs.add(name="input_ids", datatype="INT32", shape=[1, 3])
    typed.inputs[0].contents.int_contents.extend([5, 6, 7])
    typed.outputs.add(name="text_output").parameters["classification"].int64_param = 3
    typed.parameters["priority"].int64_param = 5
    return message.SerializeToString(), typed.SerializeToString()


def _files(folder: Path) -> list[Target]:
    """Files are written where no disk is used."""
    memory = Path(tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else folder))
    model = memory / "m"
    model.mkdir()
    file = memory / "file"

    def read_config(data: bytes) -> bool:
        (model / "config.pbtxt").write_bytes(data)
        problems = Problems()
        read_model_config(model, problems)
        return not problems.errors

    def read_gguf_file(data: bytes) -> None:
        file.write_bytes(data)
        check_source(GgufSource(file, "gguf"))

    def read_tensors(data: bytes) -> None:
        file.write_bytes(data)
        read_header(file)
        map_tensors(file)

    configs = tuple(
        re.sub(rb'(?m)^name: *"[^"]*"', b'name: "m"', path.read_bytes())
        for path in sorted(REPOSITORIES.glob("*/*/config.pbtxt"))
    )
    gguf, tensors = _weights(memory)
    return [
        Target("config.pbtxt", configs, read_config, 60_000),
        Target(
            "GGUF file", (gguf,), _refusing(read_gguf_file, SourceError, UnsupportedModel), 40_000
        ),
        Target("safetensors file", (tensors,), _refusing(read_tensors, TensorFileError), 60_000),
    ]


def _weights(folder: Path) -> tuple[bytes, bytes]:
    """Return a small GGUF file and a small safetensors file."""
    import numpy as np
    from gguf_files import plain_tokenizer, write_gguf
    from safetensors.numpy import save
    from tiny_models import VOCABULARY, config_of, random_model

    path = folder / "seed.gguf"
    config = config_of("llama", num_hidden_layers=1)
    write_gguf(path, random_model(config), metadata=plain_tokenizer(VOCABULARY))
    arrays = {"a.weight": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8)}
    return path.read_bytes(), save(arrays, {"format": "pt"})


def _texts() -> list[Target]:
    chance = random.Random(6)
    schemas = _as_json(*(random_schema(chance) for _ in range(60)))

    def check(kind: str) -> Callable[[bytes], bool]:
        read = _refusing(
            lambda data: check_guide(Guide(kind, data.decode("utf-8", "replace"))), GuideError
        )
        checked: Callable[[bytes], bool] = read
        return checked

    def render_template(data: bytes) -> bool:
        try:
            render(data.decode("utf-8", "replace"), _VARIABLES)
        except Exception:  # a template may fail like any program: its time is what counts here
            return False
        return True

    return [
        Target("JSON schema", schemas, check("json_schema"), 40_000),
        Target(
            "regular expression",
            (b"[a-z]{2,5}(x|y)*\\d+", b"(?i)a.?b+[^c]"),
            check("regex"),
            30_000,
        ),
        Target(
            "grammar",
            (b'root ::= "a" | b\nb ::= [0-9]+', b"start: /a+/"),
            check("ebnf_grammar"),
            20_000,
        ),
        Target("chat template", tuple(map(str.encode, _TEMPLATES)), render_template, 30_000),
    ]


def _link() -> list[Target]:
    request = GenerateRequest(7, [5, 6, 7], SamplingParams(guide=Guide("regex", "a")))
    outputs = StepOutputs([1, 2], [1, 2], ["", "length"], [0, 3], [5, 6, 7])
    stats = EngineStats(running=1, free_blocks=3, total_blocks=4)
    to_engine = (encode(request), encode(Cancel([1, 2])))
    from_engine = (encode(outputs), encode(stats))
    assert isinstance(decode_to_engine(to_engine[0]), GenerateRequest)
    return [
        Target("frame to the engine", to_engine, _refusing(decode_to_engine, LinkError), 100_000),
        Target(
            "frame from the engine", from_engine, _refusing(decode_from_engine, LinkError), 100_000
        ),
    ]
