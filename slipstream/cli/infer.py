"""`slipstream infer`: send one request with the inputs that a model declares.

The text of a text model is printed as it arrives, the outputs of any other model as JSON.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from slipstream.cli.arguments import CommandError, Parser, UsageError
from slipstream.cli.connections import (
    PORTS,
    add_address,
    add_api_key,
    add_protocol,
    choose_model,
    closing_connection,
    connect,
    read_config,
    server_address,
)
from slipstream.cli.keys import read_api_key
from slipstream.cli.log import program
from slipstream.client.connection import (
    Connection,
    GrpcConnection,
    HttpConnection,
    Request,
    ServerError,
)
from slipstream.client.declared_inputs import DeclaredInput, declared_inputs
from slipstream.client.tensors import Array, datatype_of, text_list

# names of the prompt and of the answer, newest first; INPUT_0 and OUTPUT_0 are of 2023
_PROMPT_NAMES = ("text_input", "prompt", "text", "INPUT_0")
_ANSWER_NAMES = ("text_output", "OUTPUT_0")
_MESSAGES = "messages"
_NO_TEMPLATE = "has no chat template"  # in the server's refusal of messages
_MAX_TOKENS_NAMES = ("max_tokens", "INPUT_1")
# required inputs of text models that have a neutral value
_NEUTRAL_TEXTS = {
    "bad_words": "",
    "stop_words": "",
    "INPUT_2": "",
    "INPUT_3": "",
    "sampling_parameters": "{}",
}
# names of the inputs of sampling fields, newest first
_SAMPLING_NAMES = {
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "seed": ("seed", "random_seed"),
}
_LARGEST_RANDOM = 128  # above every random integer, so that it fits each integer type


def create_parser() -> Parser:
    parser = Parser(
        "slipstream infer",
        "Send one request to a running server and print the answer. A text model needs a prompt: "
        "PROMPT, --prompt or the standard input. A model with a chat template gets it as a message "
        "of the user. The other required inputs of a model get random values.",
    )
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="Prompt of a text model.")
    parser.add_argument(
        "-m",
        "--model",
        help="Name of the model (default: the first that is not an ensemble or BLS model; "
        "required with -i grpc).",
    )
    parser.add_argument("--prompt", help="Same as PROMPT.")
    parser.add_argument(
        "--raw", action="store_true", help="Send the prompt as it is, without a chat template."
    )
    parser.add_argument("--system", metavar="TEXT", help="System message before the prompt.")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="Maximum number of tokens to generate."
    )
    _add_sampling(parser)
    add_protocol(parser, "grpc" if program() == "triton" else "http")
    add_api_key(parser)
    add_address(parser, "8000, or 8001 with -i grpc")
    return parser


def _add_sampling(parser: Parser) -> None:
    add = parser.group("sampling of text models").add_argument
    add("--temperature", type=float, help="Temperature; over 0 draws tokens (default: greedy).")
    add("--top-p", type=float, metavar="P", help="Draw from the likeliest tokens of this share.")
    add("--seed", type=int, help="Seed of the draws: the same seed gives the same text.")


def sampling(given: Namespace) -> dict[str, float]:
    """Return the sampling fields of a request.

    On Triton's protocol a temperature alone is greedy, so `top_p` is sent with it.
    """
    wanted = {"temperature": given.temperature, "top_p": given.top_p, "seed": given.seed}
    fields = {name: value for name, value in wanted.items() if value is not None}
    if fields.get("temperature"):
        fields.setdefault("top_p", 1.0)
    return fields


def run(given: Namespace) -> int:
    address = server_address(given, PORTS[given.protocol])
    connection = connect(given.protocol, address, read_api_key(given.api_key))
    try:
        with closing_connection(connection):
            _infer(connection, given)
    except KeyboardInterrupt:
        return 130  # the connection is closed, and the server stops generating
    return 0


def _infer(connection: Connection, given: Namespace) -> None:
    model = _model_name(connection, given.model)
    config = read_config(connection, model)
    prompt = _read_prompt(given, config)
    outputs = [tensor["name"] for tensor in config.get("output", [])]
    answer_name = _first_of(_ANSWER_NAMES, outputs)
    if prompt is None or answer_name is None:
        inputs = choose_inputs(model, config, prompt, given.max_tokens)
        _print_tensors("Input", inputs)
        for tensors in _answers(connection, Request(model, inputs)):
            _print_tensors("Output", tensors)
        return
    messages = None if _is_raw(given, config) else conversation(prompt, given.system)
    fields = sampling_inputs(model, config, sampling(given))
    inputs = choose_inputs(model, config, prompt, given.max_tokens, messages) | fields
    request = Request(model, inputs)
    try:
        _print_pieces(_pieces(connection, request, answer_name))
    except ServerError as error:
        if messages is None or given.system or _NO_TEMPLATE not in str(error):
            raise
        # a base model, which continues texts
        request = Request(model, choose_inputs(model, config, prompt, given.max_tokens) | fields)
        _print_pieces(_pieces(connection, request, answer_name))


def _print_pieces(pieces: Iterator[str]) -> None:
    """Print the pieces as they arrive, and end the line if there was any."""
    begun = False
    try:
        for piece in pieces:
            begun = True
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n" if begun else "")


def _model_name(connection: Connection, wanted: str | None) -> str:
    if wanted is not None:
        return wanted
    if not isinstance(connection, HttpConnection):
        raise UsageError("-m is required with -i grpc: name the model")
    return choose_model(connection.models(), None)


def _read_prompt(given: Namespace, config: Mapping[str, Any]) -> str | None:
    """Return the prompt of the command line, else for a text model the standard input."""
    if given.text is not None and given.prompt is not None:
        raise UsageError("PROMPT and --prompt exclude each other: give one")
    prompt: str | None = given.prompt if given.text is None else given.text
    takes_text = _first_of(_PROMPT_NAMES, _text_names(declared_inputs(config))) is not None
    if prompt is None and takes_text and program() != "triton" and not sys.stdin.isatty():
        return sys.stdin.read().strip() or None
    return prompt


def _is_raw(given: Namespace, config: Mapping[str, Any]) -> bool:
    """Return whether the prompt is sent without a chat template, as Triton CLI does."""
    if given.raw or program() == "triton":
        if given.system:
            raise UsageError("--system needs a chat template: leave --raw out")
        return True
    return _MESSAGES not in _text_names(declared_inputs(config))


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages of a conversation that begins with this prompt."""
    beginning = [{"role": "system", "content": system}] if system else []
    return [*beginning, {"role": "user", "content": prompt}]


def choose_inputs(
    model: str,
    config: Mapping[str, Any],
    prompt: str | None,
    max_tokens: int,
    messages: list[dict[str, str]] | None = None,
) -> dict[str, Array]:
    """Return the inputs of a request: the prompt, neutral values, and random ones for the rest.

    `messages` take the place of the prompt. Optional inputs are left out, except the number of
    tokens and `stream` of a text model.
    """
    declared = declared_inputs(config)
    prompt_name = _prompt_name(model, declared, prompt)
    max_tokens_name = _first_of(_MAX_TOKENS_NAMES, declared) if prompt_name else None
    inputs = {}
    for name, tensor in declared.items():
        if name == _MESSAGES and messages is not None:
            inputs[name] = tensor.fill(json.dumps(messages))
        elif name == prompt_name:
            if messages is None:
                inputs[name] = tensor.fill(prompt)
        elif name == max_tokens_name:
            inputs[name] = tensor.fill(max_tokens)
        elif name == "stream" and prompt_name and tensor.dtype == "bool":
            inputs[name] = tensor.fill(True)
        elif tensor.optional:
            continue
        elif tensor.is_text and name in _NEUTRAL_TEXTS:
            inputs[name] = tensor.fill(_NEUTRAL_TEXTS[name])
        else:
            inputs[name] = _random(tensor)
    return inputs


def sampling_inputs(
    model: str, config: Mapping[str, Any], fields: Mapping[str, float]
) -> dict[str, Array]:
    """Return the inputs of sampling fields, by the model's own names."""
    declared = declared_inputs(config)
    inputs = {}
    for field, value in fields.items():
        name = _first_of(_SAMPLING_NAMES[field], declared)
        if name is None:
            option = field.replace("_", "-")
            raise CommandError(f"model '{model}' has no input for --{option}; leave it out")
        inputs[name] = declared[name].fill(value)
    return inputs


def _prompt_name(
    model: str, declared: Mapping[str, DeclaredInput], prompt: str | None
) -> str | None:
    """Return the input that takes the prompt, or None if there is no prompt and no need of one."""
    texts = _text_names(declared)
    name = _first_of(_PROMPT_NAMES, texts)
    if prompt is None:
        if name is not None:
            how = "with --prompt" if program() == "triton" else "as an argument, in quotes"
            raise CommandError(f"model '{model}' takes a text in '{name}'; give it {how}")
        return None
    required = [text for text in texts if not declared[text].optional]
    if name is None and len(required) != 1:
        raise CommandError(
            f"model '{model}' has no input for a prompt; leave --prompt out to send random values"
        )
    return name or required[0]


def _text_names(declared: Mapping[str, DeclaredInput]) -> list[str]:
    return [name for name, tensor in declared.items() if tensor.is_text]


def _first_of(wanted: tuple[str, ...], names: Any) -> str | None:
    return next((name for name in wanted if name in names), None)


def _random(tensor: DeclaredInput) -> Array:
    generator = numpy.random.default_rng()
    if tensor.is_text:
        return tensor.fill(str(generator.integers(_LARGEST_RANDOM)))
    if tensor.dtype.startswith("float"):
        return generator.random(tensor.shape).astype(tensor.dtype)
    most = 2 if tensor.dtype == "bool" else _LARGEST_RANDOM
    return generator.integers(0, most, tensor.shape).astype(tensor.dtype)


def _answers(connection: Connection, request: Request) -> Iterator[Mapping[str, Array]]:
    """Yield the outputs of each response. A model may give several over gRPC."""
    if isinstance(connection, GrpcConnection):
        for answer in connection.stream([request]):
            yield answer.outputs
    else:
        yield connection.infer(request).outputs


def _pieces(connection: Connection, request: Request, name: str) -> Iterator[str]:
    """Yield the text of each response."""
    if isinstance(connection, HttpConnection):
        body = {field: _json_value(array) for field, array in request.inputs.items()}
        for event in connection.events(f"/v2/models/{request.model}/generate_stream", body):
            text = event.get(name, "")
            yield text if isinstance(text, str) else "\n".join(str(one) for one in text)
        return
    for outputs in _answers(connection, request):
        if name in outputs:
            yield "\n".join(text_list(outputs[name]))


def _json_value(array: Array) -> Any:
    """Return a tensor as the generate endpoint takes it: one value, or a list."""
    values = _values(array.reshape(-1))
    return values[0] if len(values) == 1 else values


def _values(array: Array) -> Any:
    if array.dtype != object:
        return array.tolist()
    texts = numpy.empty(array.size, dtype=object)
    texts[:] = text_list(array)
    return texts.reshape(array.shape).tolist()


def _print_tensors(kind: str, tensors: Mapping[str, Array]) -> None:
    for name, array in tensors.items():
        document = {
            "name": name,
            "shape": list(array.shape),
            "dtype": datatype_of(array),
            "value": _values(array),
        }
        print(f"{kind}: {json.dumps(document)}", flush=True)
