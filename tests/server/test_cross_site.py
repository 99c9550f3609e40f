"""Web pages and host names of other sites: what a browser on the user's machine may make the server do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_support import Answer, Connection, RunningServer, request_bytes

from slipstream.server.http.server_info import serve_metrics
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.origins import OriginPolicy, read_origin
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.options import Port, ServerOptions
from slipstream.server.services import create_app, create_context

LOGGING = "/v2/logging"
EVIL = "http://evil.example"
APP = "https://app.example"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server on a loopback address that lets the pages of one other origin use it."""
    origin_policy = OriginPolicy(local=True, hosts=("box.example",), origins=(APP,))
    app = create_app(ModelRegistry(), ServerState([]), create_context(origin_policy=origin_policy))
    with RunningServer(app) as server:
        yield server.port


def ask(
    port: int, method: str = "POST", path: str = LOGGING, host: str = "localhost", **headers: str
) -> Answer:
    lines = [["Host", host]]
    lines += [[name.replace("_", "-"), value] for name, value in headers.items()]
    body = b"{}" if method == "POST" else None
    with Connection(port) as connection:
        connection.send(request_bytes(method, path, lines, body, host=False))
        answer = connection.answer()
        assert answer is not None
        return answer


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "models.localhost:8000",
        "10.0.0.7",
        "box.example:8000",
    ],
)
def test_names_of_this_machine_and_allowed_ones_are_answered(port: int, host: str) -> None:
    assert ask(port, host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_name_of_another_site_is_refused_on_a_loopback_address(
    port: int, host: str, method: str
) -> None:
    answer = ask(port, method, host=host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin")
    assert answer.status == 403
    assert (
        f"This server is not called '{host}'. Allow it with --allowed-host" in answer.body.decode()
    )


def test_names_are_not_checked_where_other_machines_reach_the_server() -> None:
    assert OriginPolicy().knows_host("any.example")
    assert OriginPolicy(local=True, hosts=("*",)).knows_host("any.example")
    assert not OriginPolicy(local=True).knows_host("any.example")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # not a browser
        ({"Content_Type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "http://localhost", "Content_Type": "application/json"}, 200),
        ({"Origin": APP, "Sec_Fetch_Site": "cross-site"}, 200),
        # behind a proxy that changes Host
        ({"Origin": "https://proxied.example", "Sec_Fetch_Site": "same-origin"}, 200),
        ({"Origin": EVIL}, 403),
        ({"Origin": EVIL, "Sec_Fetch_Site": "cross-site"}, 403),
        ({"Origin": EVIL, "Content_Type": "application/json"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Origin": "http://localhost", "Content_Type": "text/plain"}, 415),
        ({"Origin": APP, "Content_Type": "text/plain;charset=UTF-8"}, 415),
    ],
)
def test_requests_that_change_something_are_taken_from_known_pages_only(
    port: int, headers: dict[str, str], status: int
) -> None:
    for path in (LOGGING, "/v1/completions", "/v2/models/m/generate"):
        # without a model the others are refused by their routes
        known = {200, 400, 404} if status == 200 else {status}
        assert ask(port, path=path, **headers).status in known
    assert ask(port, **headers).status == status


def test_a_page_of_another_origin_cannot_read_a_response(port: int) -> None:
    for method in ("GET", "OPTIONS"):
        answer = ask(port, method, Origin=EVIL, Access_Control_Request_Method="POST")
        assert answer.header("access-control-allow-origin") is None


def test_a_page_of_a_named_origin_can_read_responses(port: int) -> None:
    answer = ask(port, "GET", Origin=APP)
    assert answer.header("access-control-allow-origin") == APP
    assert answer.header("vary") == "Origin"
    refused = ask(port, path="/v2/models/m/generate", Origin=APP)
    assert (refused.status, refused.header("access-control-allow-origin")) == (404, APP)


def test_a_preflight_needs_no_key_and_the_request_does() -> None:
    context = create_context(
        access=Access(api_key="key"), origin_policy=OriginPolicy(origins=(APP,))
    )
    app = create_app(ModelRegistry(), ServerState([]), context)
    with RunningServer(app) as server:
        asked = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type",
        }
        preflight = ask(server.port, "OPTIONS", Origin=APP, **asked)
        assert preflight.status == 200
        assert preflight.header("access-control-allow-headers") == "authorization,content-type"
        assert "POST" in (preflight.header("access-control-allow-methods") or "")
        assert ask(server.port, "OPTIONS", Origin=EVIL, **asked).status == 401
        assert ask(server.port, Origin=APP).status == 401
        assert ask(server.port, Origin=APP, Authorization="Bearer key").status == 200


def test_any_origin_can_be_allowed() -> None:
    app = create_app(
        ModelRegistry(), ServerState([]), create_context(origin_policy=OriginPolicy(origins=("*",)))
    )
    with RunningServer(app) as server:
        answer = ask(server.port, Origin=EVIL, Sec_Fetch_Site="cross-site")
        assert (answer.status, answer.header("access-control-allow-origin")) == (200, "*")


@pytest.mark.parametrize(
    ("text", "origin"),
    [("https://A.example", "https://a.example"), ("http://h:81/", "http://h:81"), ("*", "*")],
)
def test_origins_are_read(text: str, origin: str) -> None:
    assert read_origin(text) == origin


@pytest.mark.parametrize("text", ["a.example", "https://a.example/path", "", "null"])
def test_what_is_not_an_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        read_origin(text)


@pytest.mark.parametrize(
    ("hosts", "version", "status"),
    [
        (["localhost"], "HTTP/1.1", 200),
        (["localhost"], "HTTP/1.0", 200),
        ([], "HTTP/1.0", 200),
        ([], "HTTP/1.1", 400),
        (["localhost", "localhost"], "HTTP/1.1", 400),
        (["localhost", "evil.example"], "HTTP/1.0", 400),
    ],
)
def test_a_request_has_one_host_or_is_of_http_1_0_without(
    port: int, hosts: list[str], version: str, status: int
) -> None:
    lines = [["Host", host] for host in hosts]
    with Connection(port) as connection:
        connection.send(
            request_bytes("GET", "/v2/health/live", lines, None, version=version, host=False)
        )
        answer = connection.answer()
        assert answer is not None
        assert answer.status == status
        if status == 400:
            problem = "more than one Host header" if hosts else "no Host header"
            assert answer.body.decode() == f'{{"error":"the request has {problem}"}}'
            assert connection.is_closed(20)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec_Fetch_Site": "none"}, 200),  # typed by the user
        ({"Origin": APP, "Sec_Fetch_Site": "cross-site"}, 200),
        ({"Origin": EVIL}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),  # an image of a page
        ({"Sec_Fetch_Site": "same-site"}, 403),
    ],
)
def test_a_page_of_another_origin_cannot_make_the_engines_work_with_a_get(
    port: int, headers: dict[str, str], status: int
) -> None:
    assert ask(port, "GET", "/health_generate", **headers).status == status
    assert ask(port, "GET", "/health", **headers).status == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost", 200), ("127.0.0.1:8002", 200), ("evil.example", 403)]
)
@pytest.mark.parametrize("path", ["/metrics", "/v2/health/ready", "/"])
def test_the_name_of_another_site_is_refused_on_the_metrics_port(
    host: str, status: int, path: str
) -> None:
    options = ServerOptions((), http=Port(8000, address="0.0.0.0"), metrics=Port(8002))
    app = serve_metrics(ServerMetrics(), ServerState([]), options.metrics_origin_policy)
    with RunningServer(app) as server:
        answer = ask(server.port, "GET", path, host=host)
    assert answer.status == status
    if status == 403:
        assert b"This server is not called 'evil.example'" in answer.body
