"""The link to the engine process: encoding, refused frames, the socket and the message order."""

import asyncio
import math
import os
import stat
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.messages import (
    Cancel,
    DropFrontEnd,
    EngineInfo,
    EngineStats,
    Shutdown,
    StepOutputs,
)
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine_end import EngineEnd
from slipstream.server.engine_link.link import (
    EngineFailed,
    LinkError,
    ServerEnd,
    decode_from_engine,
    decode_to_engine,
    encode,
)

numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
sampling = st.builds(
    SamplingParams,
    max_tokens=numbers,
    temperature=floats,
    top_p=floats,
    seed=st.integers(0, 2**64 - 1),
    end_ids=st.lists(numbers).map(tuple),
    bad_words=st.lists(st.lists(numbers).map(tuple)).map(tuple),
    logit_bias=st.lists(st.tuples(numbers, floats)).map(tuple),
    log_probs=st.booleans(),
)
to_engine = st.one_of(
    st.builds(
        GenerateRequest,
        request_id=numbers,
        prompt=st.lists(numbers),
        sampling=sampling,
        priority=numbers,
        deadline=st.none() | floats,
        cache_salt=st.text(),
    ),
    st.builds(Cancel, st.lists(numbers), st.text()),
    st.builds(DropFrontEnd, numbers, st.text()),
    st.just(Shutdown()),
)
from_engine = st.one_of(
    st.builds(EngineInfo, *[numbers] * 5, st.text(), st.text(), numbers, numbers, floats),
    st.builds(
        StepOutputs,
        request_ids=st.lists(numbers),
        token_counts=st.lists(numbers),
        finish_reasons=st.lists(st.text()),
        cached_tokens=st.lists(numbers),
        tokens=st.lists(numbers),
        log_probs=st.lists(floats),
        top_log_probs=st.dictionaries(numbers, st.lists(st.lists(st.tuples(numbers, floats)))),
        errors=st.dictionaries(numbers, st.text()),
    ),
    st.builds(EngineStats, *[numbers] * 12),
    st.builds(EngineFailed, st.text()),
)


@given(to_engine)
def test_message_to_the_engine_is_decoded_unchanged(message):
    assert decode_to_engine(encode(message)) == message


@given(from_engine)
def test_message_from_the_engine_is_decoded_unchanged(message):
    assert decode_from_engine(encode(message)) == message


def test_nan_of_an_unrequested_log_prob_is_kept():
    found = decode_from_engine(encode(StepOutputs(log_probs=[math.nan, -1.5])))
    assert math.isnan(found.log_probs[0])
    assert found.log_probs[1] == -1.5


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"?",
        b"G",
        b"Gnonsense",
        b"C" + msgspec.msgpack.encode({"request_ids": ["one"]}),
        b"G" + msgspec.msgpack.encode({"request_id": 1}),  # a field is missing
        encode(EngineStats()),  # a message of the other direction
        encode(Cancel([1], "left")).replace(b"left", b"le\xfft"),  # text that is not UTF-8
    ],
)
def test_invalid_message_to_the_engine_is_refused(frame):
    with pytest.raises(LinkError):
        decode_to_engine(frame)


def test_the_socket_is_private_and_removed_by_close():
    server = ServerEnd()
    folder = server.path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    server.close()
    assert not folder.exists()


def test_socket_is_created_despite_a_long_temporary_path(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    server = ServerEnd()
    server.close()
    assert os.listdir(deep) == []


async def test_messages_arrive_in_order_after_the_socket_file_is_removed():
    count = 200
    server = ServerEnd()
    arrived = []
    done = asyncio.Event()

    def on_message(message):
        arrived.append(message.steps)
        server.unlink_socket()  # both ends are connected and need no file
        server.send(Cancel([message.steps]))
        if len(arrived) == count:
            done.set()

    def engine():
        end = EngineEnd([str(server.path)])
        for step in range(count):
            end.send(EngineStats(steps=step))
        received = []
        while len(received) < count:
            assert end.wait(30)
            received += [message.request_ids[0] for message in end.receive_waiting()]
        end.close()
        results.append(received)

    results: list[list[int]] = []
    thread = threading.Thread(target=engine)
    server.attach(on_message)
    thread.start()
    async with asyncio.timeout(30):
        await done.wait()
        await asyncio.to_thread(thread.join)
    server.close()
    assert arrived == list(range(count))
    assert results == [list(range(count))]


def test_send_returns_false_when_the_other_end_is_not_connected():
    server = ServerEnd()
    assert server.send(Shutdown()) is False
    server.close()
