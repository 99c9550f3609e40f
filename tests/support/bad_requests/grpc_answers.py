"""Makes generated gRPC calls and returns what is compared of each answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import grpc

from bad_requests.grpc_cases import STREAM, GrpcCase
from slipstream.server.grpc.protocol.messages import method_messages

# code, and the error's text or the messages as bytes
Answer = tuple[str, str]

_FOLDER = re.compile(r"(?<=At:\n  )[^()]*/(?=\w+/\d+/model\.py)")


class GrpcSender:
    def __init__(self, port: int, timeout: float = 20.0) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._timeout = timeout

    def send(self, case: GrpcCase) -> Answer:
        try:
            if case.method == STREAM:
                call = self._channel.stream_stream(case.path)(
                    iter(case.messages), timeout=self._timeout
                )
                answers = [_text(case.method, data) for data in call]
            else:
                data = self._channel.unary_unary(case.path)(case.messages[0], timeout=self._timeout)
                answers = [_text(case.method, data)]
        except grpc.RpcError as error:
            return error.code().name, _FOLDER.sub("", error.details() or "")
        # requests of one stream are answered concurrently
        return "OK", "\n---\n".join(sorted(answers))

    def close(self) -> None:
        self._channel.close()


def _text(method: str, data: bytes) -> str:
    """Return a message as text, with the entries of each map in order."""
    if method.startswith("/"):
        return data.hex()
    return _FOLDER.sub("", _sorted_text(method_messages(method)[1].FromString(data)))


def _sorted_text(message: Any) -> str:
    # the bytes have the entries of maps in order; text keeps that order
    kind = type(message)
    return str(kind.FromString(message.SerializeToString(deterministic=True)))


def send_all(port: int, cases: Iterable[GrpcCase]) -> list[Answer]:
    sender = GrpcSender(port)
    try:
        return [sender.send(case) for case in cases]
    finally:
        sender.close()
