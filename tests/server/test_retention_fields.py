"""Retention fields reach the engine or are rejected by name."""

import pytest
from grpc_stack import ask, request, running, tensor, token_inputs, until
from tiny_engine import build_tiny_engine

from slipstream.engine.cache.eviction import Retention, RetentionPriority, RetentionRange
from slipstream.repository.templates import write_repository
from slipstream.server.fields.token_requests import read_retention
from slipstream.server.fields.values import read_request_fields
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor

LISTS = ("starts", "ends", "priorities", "durations_ms")


def read(**values: list[int]) -> Retention | None:
    names = {
        name: f"retention_token_range_{name}" if name in LISTS else f"retention_{name}"
        for name in values
    }
    inputs = {
        names[name]: Tensor.from_values(names[name], "INT32", (1, len(given)), given)
        for name, given in values.items()
    }
    return read_retention(read_request_fields(InferRequest("tensorrt_llm", "", inputs), {}))


def test_retention_fields_are_read():
    assert read() is None
    assert read(starts=[0, 64], ends=[64, -1], priorities=[100, 0]) == Retention(
        (
            RetentionRange(0, 64, RetentionPriority(100)),
            RetentionRange(64, None, RetentionPriority(0)),
        )
    )
    assert read(
        starts=[3],
        ends=[9],
        priorities=[50],
        durations_ms=[2000],
        decode_priority=[10],
        decode_duration_ms=[-1],
    ) == Retention((RetentionRange(3, 9, RetentionPriority(50, 2000)),), RetentionPriority(10))
    assert read(decode_priority=[7], decode_duration_ms=[30]) == Retention(
        answer=RetentionPriority(7, 30)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"starts": [0], "ends": [4]}, "must be of one length, got 1, 1, 0 and 1"),
        (
            {"starts": [4], "ends": [4], "priorities": [1]},
            "ends must be over retention_token_range_starts, got 4 and 4",
        ),
        (
            {"starts": [0], "ends": [4], "priorities": [101]},
            "priorities must be at least 0 and at most 100, got 101",
        ),
        ({"starts": [-1], "ends": [4], "priorities": [1]}, "starts must be >= 0, got -1"),
        (
            {"starts": [0] * 65, "ends": [4] * 65, "priorities": [1] * 65},
            "at most 64 ranges, got 65",
        ),
        (
            {"decode_duration_ms": [5]},
            "retention_decode_duration_ms needs retention_decode_priority",
        ),
    ],
)
def test_inconsistent_retention_fields_are_rejected_by_name(values, message):
    with pytest.raises(InferenceError, match=message):
        read(**values)


async def test_retention_reaches_the_engine(tmp_path, monkeypatch):
    folder = build_tiny_engine(tmp_path / "tiny")
    write_repository(tmp_path / "repo", "chat", folder, folder, 8)
    file = tmp_path / "repo" / "tensorrt_llm" / "config.pbtxt"
    names = [f"retention_token_range_{name}" for name in LISTS[:3]]
    file.write_text(
        file.read_text()
        + "".join(
            f'\ninput [ {{ name: "{name}" data_type: TYPE_INT32 dims: [ -1 ] optional: true }} ]\n'
            for name in names
        )
    )
    async with running(folder, tmp_path, keep=True) as stack:
        seen = []
        submit = stack.engine.submit

        def record_and_submit(request):
            seen.append(request)
            return submit(request)

        monkeypatch.setattr(stack.engine, "submit", record_and_submit)
        ranges = [
            tensor(name, values, "INT32")
            for name, values in zip(names, ([0], [2], [90]), strict=True)
        ]
        answers = await ask(
            stack.client, request("tensorrt_llm", [*token_inputs([3, 4, 5], 2), *ranges])
        )
        assert {error for _, error in answers} == {None}
        await until(lambda: stack.engine.outstanding == 0)
    assert [request.retention for request in seen] == [
        Retention((RetentionRange(0, 2, RetentionPriority(90)),))
    ]
