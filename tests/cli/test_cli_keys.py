"""Keys from files and the environment. An unusable key is refused with the name of its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli.arguments import CommandError
from slipstream.cli.keys import read_access, read_api_key


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLIPSTREAM_API_KEY", "SLIPSTREAM_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)


def test_blanks_around_keys_of_the_environment_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "\n first \nsecond\n")
    monkeypatch.setenv("SLIPSTREAM_ADMIN_KEY", "\nadmin\n")
    assert read_api_key(None) == "first"
    access = read_access(None, None)
    assert (access.api_keys, access.admin_key) == (("first", "second"), "admin")


@pytest.mark.parametrize("text", ["one\ntwo\n", "one\r\n\r\ntwo"])
def test_two_admin_keys_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(CommandError) as refused:
        read_access(None, tmp_path / "key")
    file = f"--admin-key: the key file {tmp_path / 'key'}"
    assert str(refused.value) == f"{file} has several lines; there is one admin key"
    monkeypatch.setenv("SLIPSTREAM_ADMIN_KEY", text)
    with pytest.raises(CommandError) as refused:
        read_access(None, None)
    assert str(refused.value) == "SLIPSTREAM_ADMIN_KEY has several lines; there is one admin key"


@pytest.mark.parametrize("variable", ["SLIPSTREAM_API_KEY", "SLIPSTREAM_ADMIN_KEY"])
def test_a_blank_key_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, " \n")
    with pytest.raises(CommandError) as refused:
        read_access(None, None)
    assert str(refused.value) == f"{variable} is set, but to blanks only"
    monkeypatch.setenv(variable, "")
    assert not read_access(None, None).guarded


def test_a_file_in_an_unknown_home_is_refused_by_name() -> None:
    with pytest.raises(CommandError) as refused:
        read_access(Path("~no.such.user/key"), None)
    text = "--api-key: the key file ~no.such.user/key cannot be read: there is no such home folder"
    assert str(refused.value) == text
