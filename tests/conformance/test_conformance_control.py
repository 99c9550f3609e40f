"""Recorded gRPC calls for statistics and repository control: shapes, counts, index, load, unload."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from grpc_support import (
    Client,
    RunningGrpc,
    answers,
    case_named,
    check_failure,
    document,
    loaded_server,
    message,
    model_names,
    recorded_registry,
    send,
)
from http_support import wait_until

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.metrics.statistics_api import model_statistics


def test_statistics_have_the_recorded_shape() -> None:
    registry, _ = recorded_registry()
    with RunningGrpc(registry, ServerState([])) as server, Client(server.port) as client:
        before = case_named("grpc-stats-before")
        assert send(client, before) == before["response"]["response"]
        send(client, case_named("grpc-infer-contents"))
        found = {
            entry["name"]: entry
            for entry in send(client, case_named("grpc-stats-all"))["model_stats"]
        }
        expected = case_named("grpc-stats-all")["response"]["response"]["model_stats"]
        assert found.keys() >= {entry["name"] for entry in expected} - {"raw1"}
        theirs = next(entry for entry in expected if entry["name"] == "addsub")
        assert found["addsub"].keys() == theirs.keys()
        assert found["addsub"]["inference_stats"]["success"]["count"] == "1"
        unknown = case_named("grpc-stats-unknown")
        with pytest.raises(grpc.RpcError) as raised:
            send(client, unknown)
        assert raised.value.details() == unknown["response"]["details"]
        assert raised.value.code().name == unknown["response"]["code"]


def keys(found: Any) -> Any:
    """Return the names of a document in their order, at all levels, without the values."""
    if isinstance(found, dict):
        return [(name, keys(value)) for name, value in found.items()]
    return [keys(item) for item in found] if isinstance(found, list) else type(found).__name__


@pytest.mark.parametrize(
    ("name", "model"), [("stats-model-after", "addsub"), ("stats-ensemble", "ens")]
)
def test_statistics_document_has_the_recorded_keys(name: str, model: str) -> None:
    registry, _ = recorded_registry()
    expected = json.loads(case_named(name)["response"]["body"])["model_stats"]
    with RunningGrpc(registry, ServerState([])) as server, Client(server.port) as client:
        send(client, case_named("grpc-infer-contents"))
        answers(client, case_named("grpcstream-ensemble"))
        wait_until(lambda: model_statistics(registry, "ens")[0]["inference_count"] == 1)
    assert keys(model_statistics(registry, model)) == keys(expected)
    before = json.loads(case_named("stats-model-before")["response"]["body"])["model_stats"]
    assert model_statistics(registry, "llm") == before


@pytest.mark.parametrize(
    ("name", "model", "version"), [("stats-unknown", "nope", ""), ("stats-badversion", "llm", "9")]
)
def test_statistics_of_unknown_models_and_versions_are_refused(
    name: str, model: str, version: str
) -> None:
    expected = case_named(name)["response"]
    with pytest.raises(InferenceError) as raised:
        model_statistics(recorded_registry()[0], model, version)
    assert (raised.value.message, raised.value.status) == (
        json.loads(expected["body"])["error"],
        expected["status"],
    )


def test_counts_follow_the_recorded_rules() -> None:
    """A batch of two is two inferences and one execution. Each step of an ensemble is counted."""
    registry, metrics = recorded_registry()
    batch = {
        "model_name": "addsub",
        "inputs": [
            {
                "name": name,
                "datatype": "INT32",
                "shape": ["2", "16"],
                "contents": {"int_contents": [1] * 32},
            }
            for name in ("INPUT0", "INPUT1")
        ],
    }
    with RunningGrpc(registry, ServerState([])) as server, Client(server.port) as client:
        send(client, case_named("grpc-infer-contents"))
        client.unary("ModelInfer", message("ModelInfer", batch), timeout=20)
        check_failure(client, "grpc-infer-model-error")
        check_failure(
            client, "grpc-infer-batch-too-big"
        )  # refused before the model and not counted
        answers(client, case_named("grpcstream-ensemble"))
        wait_until(lambda: metrics.model("ens").success.count == 1)
    found = {entry["name"]: entry for entry in model_statistics(registry)}
    assert (found["addsub"]["inference_count"], found["addsub"]["execution_count"]) == (3, 2)
    assert [
        (entry["batch_size"], entry["compute_infer"]["count"])
        for entry in found["addsub"]["batch_stats"]
    ] == [
        (1, 1),
        (2, 1),
    ]
    assert found["oops_nd"]["inference_stats"]["fail"]["count"] == 1
    assert (found["oops_nd"]["inference_count"], found["oops_nd"]["execution_count"]) == (0, 1)
    assert [
        found[name]["inference_stats"]["success"]["count"] for name in ("ens", "echo", "oops")
    ] == [1, 1, 1]


def index_of(client: Client, ready: bool = False) -> dict[str, dict[str, str]]:
    found = document(client.unary("RepositoryIndex", message("RepositoryIndex", {"ready": ready})))
    return {
        f"{entry['name']}:{entry.get('version', '')}": entry for entry in found.get("models", [])
    }


def recorded_index(name: str) -> dict[str, dict[str, str]]:
    """Return the recorded index, limited to the models that exist here."""
    entries = case_named(name)["response"]["response"]["models"]
    return {
        f"{entry['name']}:{entry.get('version', '')}": entry
        for entry in entries
        if entry["name"] in model_names()
    }


def test_without_model_control_the_index_is_as_recorded_and_load_is_refused() -> None:
    with loaded_server("none", sorted(model_names())) as server, Client(server.port) as client:
        assert index_of(client) == recorded_index("grpc-repo-index-none")
        with pytest.raises(grpc.RpcError) as raised:
            send(client, case_named("grpc-control-load"))
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (
            raised.value.details()
            == "explicit model load / unload is not allowed if polling is enabled"
        )


def test_models_are_loaded_and_unloaded_explicitly() -> None:
    with loaded_server("explicit", ["llm"]) as server, Client(server.port) as client:
        assert index_of(client) == recorded_index("grpc-control-index")
        assert list(index_of(client, ready=True)) == ["llm:1"]
        for name in (
            "grpc-control-index-repo",
            "grpc-control-infer-notloaded",
            "grpc-control-load-unknown",
        ):
            check_failure(client, name)
        assert send(client, case_named("grpc-control-load")) == {}
        assert send(client, case_named("grpc-control-infer-notloaded"))["model_name"] == "echo"
        assert index_of(client)["echo:1"] == {"name": "echo", "version": "1", "state": "READY"}
        assert send(client, case_named("grpc-control-unload")) == {}
        assert send(client, case_named("grpc-control-unload-unknown")) == {}
        assert index_of(client)["echo:1"] == {
            "name": "echo",
            "version": "1",
            "state": "UNAVAILABLE",
            "reason": "unloaded",
        }
        with pytest.raises(grpc.RpcError, match="'echo' has no available versions"):
            send(client, case_named("grpc-control-infer-notloaded"))
