"""`slipstream doctor` with unreadable folders, slow servers, odd variables and secrets."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.cli.doctor import command as doctor
from slipstream.cli.doctor import machine as doctor_machine
from slipstream.cli.doctor import ports as doctor_ports
from slipstream.cli.doctor.report import HIDDEN, Report, hide_in, hider, is_secret

# -- secrets


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HTTP_PROXY", "alice:hunter2pass@proxy:3128", f"{HIDDEN}@proxy:3128"),
        ("https_proxy", "http://alice:hun/ter2pass@proxy:3128", f"http://{HIDDEN}@proxy:3128"),
        ("ALL_PROXY", "socks5://alice:p@ssw0rd!x@proxy:1", f"socks5://{HIDDEN}@proxy:1"),
        ("NO_PROXY", "localhost,.example", "localhost,.example"),
        ("HF_ENDPOINT", "https://u:p@w/12345@hub/?x=1", f"https://{HIDDEN}@hub/?x=1"),
        ("HF_ENDPOINT", "https://hub/?a=1#sig=zzz&b=2", f"https://hub/?a=1#sig={HIDDEN}&b=2"),
        ("CUDA_HEADER", "Bearer abc.def", HIDDEN),
        *(
            (f"SLIPSTREAM_{word}", "a-value", HIDDEN)
            for word in ("PWD", "DBPWD", "PSK", "SAS", "SIG", "SIGNATURE", "BEARER")
        ),
        ("SLIPSTREAM_DESIGN", "a-value", "a-value"),
    ],
)
def test_secrets_in_variables_are_hidden(name: str, value: str, shown: str) -> None:
    report = Report([doctor.variables({name: value})], hider({name: value}))
    assert report.document()["sections"]["environment"] == {name: shown}


def test_a_proxys_password_is_hidden_in_any_text() -> None:
    hide = hider(
        {"HTTP_PROXY": "alice:hunter2pass@proxy", "HF_ENDPOINT": "https://u:pw12345@hub/?mail=a@b"}
    )
    assert (
        hide("cannot log in with hunter2pass or pw12345")
        == f"cannot log in with {HIDDEN} or {HIDDEN}"
    )


def test_the_current_folder_is_no_secret() -> None:
    assert [is_secret(name) for name in ("PWD", "OLDPWD", "pwd", "DB_PWD")] == [
        False,
        False,
        True,
        True,
    ]
    assert hider({"PWD": "/home/me"})("/home/me/models") == "/home/me/models"
    assert hide_in("https://hub/?pwd=abc") == f"https://hub/?pwd={HIDDEN}"


# -- ports

TRITON = json.dumps({"name": "triton", "version": "2", "extensions": [""] * 5}).encode()


@pytest.fixture
def slow_server() -> Iterator[Callable[[bytes], int]]:
    """A server that sends one byte every 10 ms."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip(head: bytes) -> None:
            asked, _ = listening.accept()
            with asked:
                try:
                    asked.recv(1 << 16)
                    asked.sendall(head)
                    for byte in TRITON:
                        asked.sendall(bytes([byte]))
                        time.sleep(0.01)
                except OSError:
                    return  # the client has closed the connection

        def start(head: bytes) -> int:
            threading.Thread(target=drip, args=(head,), daemon=True).start()
            return int(listening.getsockname()[1])

        yield start


@pytest.mark.parametrize("head", [b"", b"Content-Length: %d\r\n" % len(TRITON)])
def test_a_slow_answer_is_cut_off_at_a_deadline(
    slow_server: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """No pause reaches the limit between bytes; the whole answer would be that of a Triton."""
    monkeypatch.setattr(doctor_ports, "_ANSWER_SECONDS", 0.2)
    port = slow_server(b"HTTP/1.0 200 OK\r\n" + head + b"\r\n")
    assert doctor_ports._http_server(port) in (
        "another HTTP server",
        "something that does not answer HTTP",
    )


# -- unreadable folders


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user may not search. Root may, so the test changes its user."""
    closed = tmp_path / "closed"
    (closed / "models").mkdir(parents=True)
    closed.chmod(0o000)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield closed
    os.seteuid(before)
    closed.chmod(0o755)


def test_a_repository_in_an_unreadable_folder_is_a_finding(closed_folder: Path) -> None:
    repository = closed_folder / "models"
    found = [finding.what for finding in doctor_machine.disks(repository).findings]
    assert f"the folder for the repository, {repository}, cannot be written" in found
    section = doctor.models(repository, asked_for=True)
    assert section.facts["folder"] == str(repository)
    assert [finding.blocks for finding in section.findings] == [True]
    assert str(repository) in section.findings[0].what
    assert doctor.models(repository, asked_for=False).facts["found"].startswith("not there")


# -- invalid text and JSON


def test_variables_that_are_not_utf8_are_shown_replaced() -> None:
    section = doctor.variables({"HF_HOME": "/caf\udce9", "HF_\udcff": "x"})
    text = Report([section]).text()
    assert "  HF_HOME  /caf?\n" in text
    assert "  HF_?     x\n" in text
    assert text.encode()


@pytest.mark.parametrize(
    ("printed", "shown"), [(rb"\xff no JSON", "\ufffd no JSON"), (b"[]", "[]"), (b"", "")]
)
def test_unexpected_output_of_the_torch_probe_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: bytes, shown: str
) -> None:
    (tmp_path / "torch.py").write_text(
        f"import os; os.write(1, b'{printed.decode()}'); os._exit(0)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failure = doctor_machine.ask_torch().failure
    assert failure == f"its process ended without an answer; the last it printed is '{shown}'"
