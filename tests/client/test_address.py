"""Addresses of servers, as users write them."""

from __future__ import annotations

import pytest
from command_line import run_cli

from slipstream.client.address import AddressError, read_address
from slipstream.client.connection import GrpcConnection, HttpConnection
from slipstream.server.grpc.protocol import messages


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost", "localhost:8000"),
        ("localhost:24400", "localhost:24400"),
        ("http://10.0.0.1:80/", "10.0.0.1:80"),
        ("HTTP://host", "host:8000"),
        ("https://host:443", "https://host:443"),
        ("grpc://host:8001", "host:8001"),
        ("[::1]", "[::1]:8000"),
        ("http://[fe80::1%eth0]:9", "[fe80::1%eth0]:9"),
        ("my_host.example.org:08000", "my_host.example.org:8000"),
    ],
)
def test_an_address_is_host_and_port(text: str, address: str) -> None:
    assert read_address(text, 8000) == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("127.0.0.1:24400:3", "port '24400:3' is not a number from 1 to 65535"),
        ("http://x:y", "port 'y' is not a number"),
        ("foo:bar", "port 'bar' is not a number"),
        ("foo:", "port '' is not a number"),
        ("foo:0", "port '0' is not a number"),
        ("foo:65536", "port '65536' is not a number"),
        ("foo:\u0661", "is not a number"),
        ("::1", r"an IPv6 address needs brackets, like \[::1\]:8000"),
        ("ftp://host:21", "ftp:// is not http:// or https://"),
        ("host:80/v1", "port '80/v1' is not a number"),
        ("host/v1", "is not that of a server: give HOST:PORT, like localhost:8000"),
        ("user@host", "is not that of a server"),
        ("a b", "is not that of a server"),
        ("", "is not that of a server"),
    ],
)
def test_another_text_is_refused_with_the_form(text: str, problem: str) -> None:
    with pytest.raises(AddressError, match=problem) as refused:
        read_address(text, 8000)
    assert f"'{text}'" in str(refused.value)


def test_a_connection_needs_a_port() -> None:
    for connect in (HttpConnection, lambda url: GrpcConnection(messages, url)):
        with pytest.raises(AddressError, match="'localhost' has no port; give HOST:PORT"):
            connect("localhost")


@pytest.mark.parametrize(
    "words",
    [
        ("infer", "hi", "-u", "127.0.0.1:24400:3"),
        ("infer", "hi", "-p", "99999"),
        ("chat", "-u", "http://x:y"),
        ("status", "-u", "foo:bar"),
        ("status", "-i", "grpc", "-u", "foo:bar"),
        ("status", "--metrics", "-u", "foo:bar"),
        ("config", "-m", "m", "-u", "foo:bar"),
        ("metrics", "-u", "foo:bar"),
        ("bench", "-m", "m", "-u", "foo:bar"),
        ("client", "--text", "hi", "-u", "foo:bar"),
    ],
)
def test_every_command_refuses_a_bad_address_in_one_line(words: tuple[str, ...]) -> None:
    result = run_cli(words)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: address '")
    assert "is not a number from 1 to 65535; give HOST:PORT, like localhost:8000" in line
