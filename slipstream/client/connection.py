"""A connection to a server: tensors in, tensors out, over gRPC or HTTP."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slipstream.client.address import read_address
from slipstream.client.tensors import Array, datatype_of, from_bytes, from_json, to_bytes, to_json

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
# the beginnings of grpc's own error texts
_UNREACHED = ("failed to connect to all addresses", "connections to all backends failing")
# their ends if a server answers that does not understand gRPC
_HUNG_UP = ("Socket closed", "Connection reset by peer")


class ServerError(Exception):
    """An error of the server, or of the connection. `cancelled`: the client cancelled the call."""

    def __init__(self, text: str, cancelled: bool = False) -> None:
        super().__init__(text)
        self.cancelled = cancelled


class Unreached(ServerError):
    """No server answers at an address, or one with another protocol."""


@dataclass(frozen=True)
class Request:
    model: str
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...] = ()  # requested outputs; empty: all
    request_id: str = ""
    parameters: Mapping[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    outputs: Mapping[str, Array]
    request_id: str = ""
    final: bool = True


@dataclass(frozen=True)
class Tls:
    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None


class Connection(Protocol):
    url: str

    def infer(self, request: Request) -> Answer: ...

    def input_types(self, model: str) -> Mapping[str, str]:
        """Return the types of the inputs that a model declares."""

    def config(self, model: str) -> dict[str, Any]:
        """Return the configuration of a served model."""

    def statistics(self, model: str) -> dict[str, Any]:
        """Return the server's statistics of a model."""

    def metadata(self) -> dict[str, Any]:
        """Return name, version and extensions of the server."""

    def index(self) -> list[dict[str, Any]]:
        """Return name, version, state and reason of the models in the repository."""

    def health(self) -> dict[str, bool]:
        """Return whether the server is live, and whether it is ready."""

    def close(self) -> None: ...


class Pending:
    """The future answer to a request."""

    def __init__(self, future: Any, url: str) -> None:
        self._future = future
        self._url = url

    def result(self) -> Answer:
        import grpc

        try:
            return _answer(self._future.result())
        except grpc.FutureCancelledError:
            raise ServerError("Locally cancelled by application!", cancelled=True) from None
        except grpc.RpcError as error:
            raise _server_error(error, self._url) from error

    def cancel(self) -> None:
        self._future.cancel()


class GrpcConnection:
    """A gRPC channel. `messages` holds the protocol's message classes and its service name."""

    def __init__(
        self,
        messages: Any,
        url: str,
        tls: Tls | None = None,
        compression: str | None = None,
        key: str = "",
    ) -> None:
        self.url = url = read_address(url)
        self._messages = messages
        self._headers = [("authorization", f"Bearer {key}")] if key else []
        self._channel = _open_channel(url, tls, compression)
        self._infer = self._channel.unary_unary(
            f"/{messages.SERVICE}/ModelInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelInferResponse.FromString,
        )
        self._stream = self._channel.stream_stream(
            f"/{messages.SERVICE}/ModelStreamInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )

    def infer(self, request: Request) -> Answer:
        return self.infer_later(request).result()

    def _ask(self, method: str, **fields: str) -> Any:
        import grpc

        request, answer = self._messages.method_messages(method)
        call = self._channel.unary_unary(
            f"/{self._messages.SERVICE}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return call(request(**fields), metadata=self._headers)
        except grpc.RpcError as error:
            raise _server_error(error, self.url) from error

    def input_types(self, model: str) -> Mapping[str, str]:
        return {
            tensor.name: tensor.datatype for tensor in self._ask("ModelMetadata", name=model).inputs
        }

    def config(self, model: str) -> dict[str, Any]:
        from google.protobuf.json_format import MessageToDict

        config = self._ask("ModelConfig", name=model).config
        document: dict[str, Any] = MessageToDict(config, preserving_proto_field_name=True)
        return document

    def statistics(self, model: str) -> dict[str, Any]:
        from google.protobuf.json_format import MessageToDict

        statistics = self._ask("ModelStatistics", name=model)
        document: dict[str, Any] = MessageToDict(statistics, preserving_proto_field_name=True)
        return document

    def metadata(self) -> dict[str, Any]:
        found = self._ask("ServerMetadata")
        return {"name": found.name, "version": found.version, "extensions": list(found.extensions)}

    def index(self) -> list[dict[str, Any]]:
        return [
            {
                "name": model.name,
                "version": model.version,
                "state": model.state,
                "reason": model.reason,
            }
            for model in self._ask("RepositoryIndex").models
        ]

    def health(self) -> dict[str, bool]:
        return {"live": self._ask("ServerLive").live, "ready": self._ask("ServerReady").ready}

    def infer_later(self, request: Request) -> Pending:
        message = _request_message(self._messages, request)
        return Pending(self._infer.future(message, metadata=self._headers), self.url)

    def stream(self, requests: Iterable[Request], timeout: float | None = None) -> Stream:
        """Return the answers to the requests as they arrive, until the server ends the stream."""
        wire = (_request_message(self._messages, request) for request in requests)
        return Stream(self._stream(wire, timeout=timeout, metadata=self._headers), self.url)

    def close(self) -> None:
        self._channel.close()


class Stream:
    """The answers of one gRPC stream."""

    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url

    def __iter__(self) -> Iterator[Answer]:
        import grpc

        try:
            for message in self._call:
                if message.error_message:
                    raise ServerError(message.error_message)
                yield _answer(message.infer_response)
        except grpc.RpcError as error:
            raise _server_error(error, self._url) from error

    def cancel(self) -> None:
        self._call.cancel()


class HttpConnection:
    def __init__(self, url: str, key: str = "") -> None:
        import httpx

        address = read_address(url)
        self.url = address if "://" in address else f"http://{address}"
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            timeout=httpx.Timeout(10.0, read=None), trust_env=False, limits=limits, headers=headers
        )

    def input_types(self, model: str) -> Mapping[str, str]:
        document = self._document("GET", f"/v2/models/{model}", None)
        return {tensor["name"]: tensor["datatype"] for tensor in document["inputs"]}

    def config(self, model: str) -> dict[str, Any]:
        return self._document("GET", f"/v2/models/{model}/config", None)

    def statistics(self, model: str) -> dict[str, Any]:
        return self._document("GET", f"/v2/models/{model}/stats", None)

    def metadata(self) -> dict[str, Any]:
        return self._document("GET", "/v2", None)

    def index(self) -> list[dict[str, Any]]:
        found: Any = self._document("POST", "/v2/repository/index", {})
        return list(found)

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object of a route."""
        return self._document("GET", path, None)

    def health(self) -> dict[str, bool]:
        return {word: self._get(f"/v2/health/{word}").is_success for word in ("live", "ready")}

    def infer(self, request: Request) -> Answer:
        body: dict[str, Any] = {
            "inputs": [to_json(name, array) for name, array in request.inputs.items()]
        }
        if request.outputs:
            body["outputs"] = [{"name": name} for name in request.outputs]
        if request.request_id:
            body["id"] = request.request_id
        if request.parameters:
            body["parameters"] = dict(request.parameters)
        document = self._document("POST", f"/v2/models/{request.model}/infer", body)
        outputs = {tensor["name"]: from_json(tensor) for tensor in document["outputs"]}
        return Answer(outputs, document.get("id", ""))

    def _get(self, path: str) -> Any:
        import httpx

        try:
            return self._client.get(self.url + path)
        except httpx.HTTPError as error:
            raise _broken(self.url, error) from error

    def _document(self, method: str, path: str, body: Any) -> dict[str, Any]:
        import httpx

        try:
            response = self._client.request(method, self.url + path, json=body)
            if response.status_code == httpx.codes.METHOD_NOT_ALLOWED:
                raise Unreached(_other_server(self.url))
            if not response.is_success:
                raise _refusal(response)
            document: dict[str, Any] = response.json()
        except httpx.HTTPError as error:
            raise _broken(self.url, error) from error
        except ValueError as error:  # the metrics port answers every path
            raise Unreached(_other_server(self.url)) from error
        return document

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """Return the JSON object that a route answers with."""
        return self._document("POST", path, body)

    def models(self) -> dict[str, str]:
        """Return the text models. An adapter's value is the model that it belongs to."""
        document = self._document("GET", "/v1/models", None)
        try:
            return {model["id"]: model.get("parent", "") for model in document["data"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"the server at {self.url} has no list of models") from error

    def events(self, path: str, body: Any) -> Generator[Any, None, None]:
        """Yield the data of server-sent events. Closing the generator makes the server stop."""
        import httpx

        try:
            with self._client.stream("POST", self.url + path, json=body) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                for data in _data(response.iter_bytes()):
                    event = json.loads(data)
                    if text := _error_text(event):
                        raise ServerError(text)
                    yield event
        except httpx.HTTPError as error:
            raise _broken(self.url, error) from error
        except ValueError as error:
            raise ServerError(f"the answer of {self.url} cannot be read: {error}") from error

    def close(self) -> None:
        self._client.close()


def _data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what follows `data:` in each line.

    Only a line feed ends a line: JSON may hold U+2028, at which `splitlines` would cut.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data


def _refusal(response: Any) -> ServerError:
    try:
        text = _error_text(json.loads(response.content.removeprefix(b"data:")))
    except ValueError:
        text = ""  # some other server's error page
    return ServerError(text or f"the server answered {response.status_code}")


def _error_text(document: Any) -> str:
    """Return the error of a document, in Triton's form (a text) or OpenAI's (an object)."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error") or ""
    return str(error.get("message", "") if isinstance(error, dict) else error)


def _open_channel(url: str, tls: Tls | None, compression: str | None) -> Any:
    import grpc

    kinds = {
        None: None,
        "none": grpc.Compression.NoCompression,
        "deflate": grpc.Compression.Deflate,
        "gzip": grpc.Compression.Gzip,
    }
    if tls is None:
        return grpc.insecure_channel(url, options=_OPTIONS, compression=kinds[compression])
    files = (tls.root_certificates, tls.private_key, tls.certificate_chain)
    contents = [path.read_bytes() if path else None for path in files]
    credentials = grpc.ssl_channel_credentials(*contents)
    return grpc.secure_channel(url, credentials, options=_OPTIONS, compression=kinds[compression])


def _request_message(messages: Any, request: Request) -> Any:
    message = messages.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, array in request.inputs.items():
        message.inputs.add(name=name, datatype=datatype_of(array), shape=list(array.shape))
        message.raw_input_contents.append(to_bytes(array))
    for name in request.outputs:
        message.outputs.add(name=name)
    for name, value in request.parameters.items():
        setattr(message.parameters[name], _parameter_kind(value), value)
    return message


def _parameter_kind(value: bool | int | str) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "int64_param" if isinstance(value, int) else "string_param"


def _answer(message: Any) -> Answer:
    pairs = zip(message.outputs, message.raw_output_contents, strict=True)
    outputs = {
        tensor.name: from_bytes(tensor.datatype, list(tensor.shape), raw) for tensor, raw in pairs
    }
    flag = message.parameters.get("triton_final_response")
    return Answer(outputs, message.id, flag is None or flag.bool_param)


def _server_error(error: Any, url: str) -> ServerError:
    import grpc

    if error.code() is grpc.StatusCode.CANCELLED:
        return ServerError("Locally cancelled by application!", cancelled=True)
    text = grpc_error_text(error, url)
    unreached = (error.details() or "").startswith(_UNREACHED)
    return Unreached(text) if unreached else ServerError(text)


def grpc_error_text(error: Any, url: str) -> str:
    """Return the server's error text, or why there is no server.

    UNAVAILABLE is not enough to know that: a server answers it, too, if its queue is full.
    """
    details: str = error.details() or ""
    if not details.startswith(_UNREACHED):
        return details
    if details.endswith(_HUNG_UP):
        return f"the server at {url} does not speak gRPC; give its gRPC port (8001 by default)"
    return _no_server(url, "gRPC ")


def _broken(url: str, error: Exception) -> ServerError:
    """Return the error of an HTTP connection that could not be made, or that broke."""
    import httpx

    if isinstance(error, httpx.ConnectError):
        return Unreached(_no_server(url))
    if isinstance(error, httpx.RemoteProtocolError) and "illegal" in str(error):
        host = url.removeprefix("http://")
        return Unreached(
            f"the server at {host} does not speak HTTP; give its HTTP port (8000 by default)"
        )
    return ServerError(f"the connection to {url} broke: {error}")


def _other_server(url: str) -> str:
    host = url.removeprefix("http://")
    return (
        f"the server at {host} has no models: it may be a metrics port; give its HTTP port (8000 "
        "by default)"
    )


def _no_server(url: str, protocol: str = "") -> str:
    host = url.removeprefix("http://")
    remedy = "start one with slipstream start or slipstream launch"
    return f"no server answers {protocol}at {host}; {remedy}"
