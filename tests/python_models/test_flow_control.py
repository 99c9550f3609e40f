"""Flow control: a model blocks before unread responses fill the server's memory; others run on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from python_model_harness import Opened, ask, open_models, response_texts, text_request, write_model

from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.http.server import HttpServer
from slipstream.server.kserve.health import ServerState
from slipstream.server.python_models import instance as instances
from slipstream.server.python_models import model as models
from slipstream.server.python_models.flow_control import WINDOW_BYTES, FlowControl
from slipstream.server.python_models.request_queue import Pending
from slipstream.server.services import create_app

LENGTH = 64 << 10
COUNT = 1000  # responses of LENGTH bytes: 16 times the window
DECOUPLED = "model_transaction_policy { decoupled: true }"
# "flood" answers from a thread, "serial" from within `execute`; both until they are cancelled.
FLOOD = f"""
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

END = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def answer(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))])

class TritonPythonModel:
    def initialize(self, args):
        self.sent, self.ended = 0, 0

    def execute(self, requests):
        for request in requests:
            text = request.inputs()[0].as_numpy()[0].decode()
            sender = request.get_response_sender()
            if text == "flood":
                threading.Thread(target=self.flood, args=(sender,)).start()
            elif text == "serial":
                self.flood(sender)
            else:
                sender.send(answer(f"{{self.sent}} sent, {{self.ended}} ended"), END)

    def flood(self, sender):
        for number in range({COUNT}):
            if sender.is_cancelled():
                break
            sender.send(answer(str(number).ljust({LENGTH})))
            self.sent += 1
        self.ended += 1
        sender.send(flags=END)
"""


@asynccontextmanager
async def flooding(folder: Path) -> AsyncIterator[Opened]:
    async with open_models(write_model(folder, "flood", FLOOD, DECOUPLED), "flood") as opened:
        yield opened


def unread(pending: Pending) -> int:
    """Return the bytes of text in a request's responses that are not read."""
    return sum(
        len(response.outputs[0].strings()[0])
        for response, *_ in pending.answers
        if response is not None
    )


async def progress(opened: Opened) -> str:
    (text,) = response_texts(await ask(opened["flood"], "how many?"))
    return text


async def standstill(opened: Opened) -> str:
    """Return the model's progress once it sends nothing more, while one of its requests is blocked."""
    unchanged = 0
    now = await progress(opened)
    while unchanged < 10 or now.startswith("0 "):
        await asyncio.sleep(0.05)
        before = now
        now = await progress(opened)
        unchanged = unchanged + 1 if before == now else 0
    return now


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def until_reported(opened: Opened, end: str) -> None:
    while not (await progress(opened)).endswith(end):
        await asyncio.sleep(0.01)


def held(opened: Opened) -> Pending:
    (pending,) = opened["flood"]._running.values()
    return pending


def test_the_window_opens_again_when_all_markers_are_acknowledged() -> None:
    """Otherwise a sender would block forever: only markers are acknowledged."""
    chance = random.Random(7)
    for most in (300, 1 << 16, 8 << 20):
        counted = FlowControl()
        markers = 0
        for _ in range(20_000):
            if counted.full:
                assert markers
            if markers and (counted.full or chance.random() < 0.01):
                counted.acknowledged()
                markers -= 1
            elif not counted.full:
                markers += counted.sent(chance.randrange(1, most))
        for _ in range(markers):
            counted.acknowledged()
        assert 0 <= counted.unread < WINDOW_BYTES // 32


async def test_unread_responses_are_bounded_and_none_is_lost(tmp_path: Path) -> None:
    async with flooding(tmp_path) as opened, asyncio.timeout(30):
        answers = opened["flood"].infer(text_request("flood"))
        first = await anext(answers)
        assert (await standstill(opened)).endswith("0 ended")
        assert WINDOW_BYTES // 2 < unread(held(opened)) <= WINDOW_BYTES + LENGTH
        rest = response_texts([answer async for answer in answers])
        assert [text.strip() for text in (*response_texts([first]), *rest)] == [
            str(number) for number in range(COUNT)
        ]
        assert await progress(opened) == f"{COUNT} sent, 1 ended"


async def test_cancelling_a_request_unblocks_its_sender(tmp_path: Path) -> None:
    async with flooding(tmp_path) as opened, asyncio.timeout(30):
        answers = opened["flood"].infer(text_request("flood"))
        await anext(answers)
        await standstill(opened)
        await answers.aclose()
        await until_reported(opened, " 1 ended")
        # blocks the thread that would execute others
        serial = opened["flood"].infer(text_request("serial"))
        await anext(serial)
        await until(lambda: unread(held(opened)) > WINDOW_BYTES // 2)
        waiting = asyncio.ensure_future(progress(opened))
        await serial.aclose()
        assert (await waiting).endswith(" 2 ended")


@pytest.mark.parametrize("text", ["flood", "serial"])
async def test_a_model_can_be_unloaded_while_a_sender_is_blocked(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DRAIN_SECONDS", 0.1)
    monkeypatch.setattr(instances, "STOP_SECONDS", 0.1)
    async with flooding(tmp_path) as opened, asyncio.timeout(30):
        answers = opened["flood"].infer(text_request(text))
        await anext(answers)
        await until(lambda: unread(held(opened)) > WINDOW_BYTES // 2)
        await opened["flood"].close()
        *_, last = [answer async for answer in answers]
        assert last.error is not None
        assert last.error.message.startswith("the process of model instance 'flood_0' ended: ")


Stop = Callable[[], Awaitable[None]]


@asynccontextmanager
async def unread_http(opened: Opened) -> AsyncIterator[Stop]:
    """Connect a client of generate_stream that reads nothing; yield what stops it."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(create_app(opened.registry, ServerState([])))
    await server.open(listening)

    async def stop() -> None:
        await server.close(1)

    body = json.dumps({"text_input": "flood"}).encode()
    head = f"POST /v2/models/flood/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(listening.getsockname()) as client:
        client.sendall(head.encode() + body)
        yield stop
    await until(lambda: not opened["flood"]._running)
    await stop()


@asynccontextmanager
async def unread_grpc(opened: Opened) -> AsyncIterator[Stop]:
    """Connect a client of ModelStreamInfer that reads nothing; yield what stops it."""
    options = GrpcOptions()
    server = create_grpc_server(opened.registry, ServerState([]), None, options)
    address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', options)}"
    await server.start()
    given = triton.service_pb2.ModelInferRequest(model_name="flood")
    given.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        b"flood"
    )
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(given.SerializeToString())
        yield lambda: server.stop(0.1)
        call.cancel()
    await until(lambda: not opened["flood"]._running)
    await server.stop(None)


@pytest.mark.parametrize("who_leaves", ["client", "server"])
@pytest.mark.parametrize("client", [unread_http, unread_grpc])
async def test_a_client_that_does_not_read_does_not_fill_the_servers_memory(
    tmp_path: Path,
    client: Callable[[Opened], Any],
    who_leaves: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with flooding(tmp_path) as opened, asyncio.timeout(30):
        async with client(opened) as stop:
            assert (await standstill(opened)).endswith(" 0 ended")
            assert WINDOW_BYTES // 2 < unread(held(opened)) <= WINDOW_BYTES + LENGTH
            if who_leaves == "server":
                await stop()
                await until_reported(opened, " 1 ended")
        await until_reported(opened, " 1 ended")
        assert opened["flood"].outstanding == 0
    assert [record for record in caplog.records if record.exc_info] == []


PASSING_ON = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.pass_on, args=(request,)).start()

    def pass_on(self, request):
        sender = request.get_response_sender()
        call = pb_utils.InferenceRequest(
            model_name="flood", requested_output_names=["text_output"], inputs=request.inputs()
        )
        for answer in call.exec(decoupled=True):
            sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_flow_control_reaches_through_a_model_that_calls_another(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, "passing", PASSING_ON, DECOUPLED)
    write_model(tmp_path, "flood", FLOOD, DECOUPLED)
    async with open_models(tmp_path, "flood", "passing") as opened, asyncio.timeout(30):
        answers = opened["passing"].infer(text_request("flood"))
        first = await anext(answers)
        sent, _, ended = (await standstill(opened)).partition(" sent, ")
        assert ended == "0 ended"
        # unread: the responses of both models in the server, and those to the call in the process
        assert int(sent) * LENGTH <= 3 * (WINDOW_BYTES + LENGTH) + LENGTH
        rest = response_texts([answer async for answer in answers])
        assert [text.strip() for text in (*response_texts([first]), *rest)] == [
            str(number) for number in range(COUNT)
        ]
        assert all(not instance._calls._flows for instance in opened["passing"]._instances.values())


async def test_a_request_is_cancelled_when_nothing_is_read_for_long(tmp_path: Path) -> None:
    """In a process of its own, with a short time limit."""
    hasty = "from slipstream.server.python_models import channel\nchannel.STALL_SECONDS = 0.05\n"
    folder = write_model(tmp_path, "flood", hasty + FLOOD, DECOUPLED)
    async with open_models(folder, "flood") as opened, asyncio.timeout(30):
        answers = opened["flood"].infer(text_request("serial"))
        await anext(answers)
        # the request that waited for the model is served
        assert (await progress(opened)).endswith(" 1 ended")
        texts = response_texts([answer async for answer in answers])
        assert len(texts) * LENGTH <= WINDOW_BYTES + LENGTH
        assert [text.strip() for text in texts[:-1]] == [
            str(number) for number in range(1, len(texts))
        ]
        assert texts[-1] == "! given up: none of its answers was read for 60 seconds"
