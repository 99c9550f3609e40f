"""Keys and restricted APIs of both protocols: calls that are not allowed are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_support import Connection, RunningServer, request_bytes

from slipstream.cli.arguments import CommandError
from slipstream.cli.keys import read_access
from slipstream.server.kserve.access import (
    ADMIN_APIS,
    APIS,
    Access,
    Restriction,
    parse_restrictions,
)
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.services import create_app, create_context

ROUTES = {
    ("GET", "/v2"): 200,
    ("GET", "/v2/models/m"): 404,
    ("GET", "/v2/models/m/config"): 404,
    ("GET", "/v2/models/m/stats"): 400,
    ("GET", "/v2/models/stats"): 200,
    ("POST", "/v2/models/m/infer"): 404,
    ("POST", "/v2/models/m/generate"): 404,
    ("POST", "/v2/models/m/generate_stream"): 404,
    ("GET", "/openapi.json"): 200,
    ("GET", "/v1/models"): 200,
    ("GET", "/v1/models/m"): 404,
    ("GET", "/health_generate"): 200,
    ("POST", "/v1/chat/completions"): 400,
    ("POST", "/v1/completions"): 400,
    ("POST", "/v1/responses"): 400,
    ("GET", "/v1/responses/resp_0"): 404,
    ("POST", "/v1/messages"): 400,
    ("POST", "/v1/messages/count_tokens"): 400,
    ("DELETE", "/v1/responses/resp_0"): 404,
    ("POST", "/v1/embeddings"): 400,
    ("POST", "/v1/rerank"): 400,
    ("POST", "/v2/rerank"): 400,
    ("POST", "/rerank"): 400,
    ("POST", "/score"): 400,
    ("POST", "/v1/score"): 400,
    ("POST", "/v1/unknown"): 404,
    ("GET", "/version"): 200,
    ("GET", "/load"): 200,
    ("GET", "/metrics"): 404,
    ("POST", "/tokenize"): 400,
    ("POST", "/detokenize"): 400,
}
HEALTH_ROUTES = {
    ("GET", "/v2/health/live"): 200,
    ("GET", "/v2/health/ready"): 200,
    ("GET", "/v2/models/m/ready"): 400,
    ("GET", "/health"): 200,
    ("GET", "/ping"): 200,
    ("POST", "/ping"): 200,
    ("GET", "/health/ready"): 200,
}
PAGES = {("GET", "/"): 200, ("GET", "/docs"): 200}
ADMIN_ROUTES = {
    ("POST", "/v1/load_lora_adapter"): 400,
    ("POST", "/v1/unload_lora_adapter"): 400,
    ("POST", "/v2/repository/index"): 200,
    ("POST", "/v2/repository/models/m/load"): 503,
    ("POST", "/v2/repository/models/m/unload"): 503,
    ("GET", "/v2/logging"): 200,
    ("GET", "/v2/trace/setting"): 200,
    ("GET", "/v2/models/m/trace/setting"): 400,
    ("GET", "/v2/systemsharedmemory/status"): 200,
    ("GET", "/v2/cudasharedmemory/status"): 200,
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    access = Access(api_key="user-key", admin_key="admin-key")
    with RunningServer(
        create_app(ModelRegistry(), ServerState([]), create_context(access=access))
    ) as server:
        yield server.port


def status(port: int, method: str, path: str, *headers: list[str]) -> int:
    with Connection(port) as connection:
        connection.send(
            request_bytes(method, path, list(headers), b"" if method == "POST" else None)
        )
        answer = connection.answer()
        assert answer is not None
        return answer.status


@pytest.mark.parametrize("route", [*ROUTES, *ADMIN_ROUTES])
def test_every_route_needs_a_key(port: int, route: tuple[str, str]) -> None:
    assert status(port, *route) == 401
    assert status(port, *route, ["Authorization", "Bearer wrong"]) in (401, 403)


@pytest.mark.parametrize(("route", "expected"), {**HEALTH_ROUTES, **PAGES}.items())
def test_health_probes_and_pages_need_no_key(
    port: int, route: tuple[str, str], expected: int
) -> None:
    assert status(port, *route) == expected


def test_health_probes_can_need_the_key() -> None:
    access = Access(api_key="user-key", health_needs_key=True)
    context = create_context(access=access)
    with RunningServer(create_app(ModelRegistry(), ServerState([]), context)) as server:
        for route, expected in HEALTH_ROUTES.items():
            assert status(server.port, *route) == 401
            assert status(server.port, *route, ["X-API-Key", "user-key"]) == expected
    for protocol in ("http", "grpc"):
        assert refused(access, "health", protocol) == 401
        assert refused(Access(api_key="user-key"), "health", protocol) == 0


@pytest.mark.parametrize(("route", "expected"), ROUTES.items())
def test_the_api_key_allows_user_routes(port: int, route: tuple[str, str], expected: int) -> None:
    assert status(port, *route, ["Authorization", "Bearer user-key"]) == expected
    assert status(port, *route, ["X-API-Key", "admin-key"]) == expected


@pytest.mark.parametrize(("route", "expected"), ADMIN_ROUTES.items())
def test_only_the_admin_key_allows_control_routes(
    port: int, route: tuple[str, str], expected: int
) -> None:
    assert status(port, *route, ["Authorization", "Bearer user-key"]) == 403
    assert status(port, *route, ["Authorization", "Bearer admin-key"]) == expected


def refused(access: Access, api: str, protocol: str = "http", **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    refusal = (access.refuse_http if protocol == "http" else access.refuse_grpc)(api, given.get)
    return 0 if refusal is None else refusal.status


@pytest.mark.parametrize("api", APIS)
def test_a_single_key_protects_every_api(api: str) -> None:
    for access in (Access(api_key="k", health_needs_key=True), Access("", "k", {}, {}, True)):
        for protocol in ("http", "grpc"):
            assert refused(access, api, protocol) == 401
            assert refused(access, api, protocol, authorization="bearer k") == 0
            assert refused(access, api, protocol, authorization="k") == 401
    assert refused(Access(), api) == 0
    access = Access(api_key="k", admin_key="a", health_needs_key=True)
    wrong = refused(access, api, x_api_key="x")
    assert wrong == (403 if api in ADMIN_APIS else 401)


@pytest.mark.parametrize("api", APIS)
def test_none_of_several_api_keys_allows_control(api: str) -> None:
    access = Access(api_key="ours\ntheirs", health_needs_key=True)
    for protocol in ("http", "grpc"):
        assert refused(access, api, protocol, x_api_key="ours") == (403 if api in ADMIN_APIS else 0)
        assert refused(access, api, protocol, x_api_key="ours\ntheirs") == (
            403 if api in ADMIN_APIS else 401
        )


def test_restrictions_are_parsed_and_errors_name_the_problem() -> None:
    assert parse_restrictions(["inference,statistics:key=v=1", "health:h=2"]) == {
        "inference": Restriction("key", "v=1"),
        "statistics": Restriction("key", "v=1"),
        "health": Restriction("h", "2"),
    }
    for text, reason in {
        "inference": "must be",
        "inference:key": "must be",
        "infer:key=v": "unknown API 'infer'",
        "health,health:a=b": "more than once",
    }.items():
        with pytest.raises(ValueError, match=reason):
            parse_restrictions([text])


def test_keys_come_from_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_ADMIN_KEY", "from-environment")
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    (tmp_path / "key").write_text("  from-file\n")
    access = read_access(tmp_path / "key", None)
    assert (access.api_key, access.admin_key) == ("from-file", "from-environment")
    assert "from-file" not in repr(access)
    (tmp_path / "empty").write_text("\n")
    for file in ("empty", "missing"):
        with pytest.raises(CommandError, match="--api-key: the key file"):
            read_access(tmp_path / file, None)
