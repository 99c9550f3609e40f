"""The chat page: its content, its security headers, and that it fits the API."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from grpc_support import recorded_registry
from http_support import Answer, RunningServer, get

from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.fields import ChatFields, CompletionFields
from slipstream.server.services import create_app, create_context

FILE = Path(__file__).parents[2] / "slipstream" / "server" / "http" / "chat.html"
CONTROLS = {"input", "select", "textarea"}


class Elements(HTMLParser):
    """The elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts:
            self.texts[self._tag].append(data)

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.found if name in attributes]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with RunningServer(create_app(recorded_registry()[0], ServerState([]))) as server:
        yield server.port


@pytest.fixture(scope="module")
def page() -> Elements:
    return Elements(FILE.read_text("utf-8"))


def policy(answer: Answer) -> dict[str, list[str]]:
    parts = (answer.header("content-security-policy") or "").split("; ")
    return {name: values for name, *values in map(str.split, parts)}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_are_served_unchanged_with_a_policy_for_their_own_script(
    port: int, path: str
) -> None:
    answer = get(port, path)
    file = FILE.with_name("chat.html" if path == "/" else "docs.html")
    assert (answer.status, answer.header("content-type")) == (200, "text/html; charset=utf-8")
    assert answer.body == file.read_bytes()
    rules = policy(answer)
    for tag in ("script", "style"):
        (text,) = Elements(answer.body.decode()).texts[tag]
        assert rules[f"{tag}-src"] == [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        ]
    assert (rules["default-src"], rules["connect-src"]) == (["'none'"], ["'self'"])
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert answer.header("x-content-type-options") == "nosniff"


def test_the_page_loads_nothing_from_other_servers(page: Elements) -> None:
    text = FILE.read_text("utf-8")
    assert len(text.splitlines()) < 400
    assert not re.search(r"https?:|[\"'(]//|@import|\bimport\s*\(|\beval\b|innerHTML", text)
    assert set(page.values("href")) == {"data:,", "docs"}
    assert page.values("src") == page.values("style") == []
    assert not [
        name for _, attributes in page.found for name in attributes if name.startswith("on")
    ]


def test_every_control_has_a_label_and_every_reference_a_target(page: Elements) -> None:
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    controls = [attributes["id"] for tag, attributes in page.found if tag in CONTROLS]
    assert sorted(controls) == sorted(page.values("for"))
    assert set(page.values("aria-describedby")) | set(page.values("form")) <= set(ids)
    (script,) = page.texts["script"]
    assert set(re.findall(r'\bat\("(\w+)"\)', script)) <= set(ids)
    (html,) = [attributes for tag, attributes in page.found if tag == "html"]
    assert html["lang"] == "en"
    roles = {attributes.get("role"): attributes for _, attributes in page.found}
    assert {"log", "status", "alert"} <= set(roles)
    assert roles["log"]["aria-label"] == "Conversation"


def test_the_routes_and_fields_that_the_page_uses_exist(port: int, page: Elements) -> None:
    (script,) = page.texts["script"]
    asked = set(re.findall(r'"(v1/[\w/]+)"', script))
    assert asked == {"v1/models", "v1/chat/completions", "v1/completions"}
    assert {f"/{path}" for path in asked} <= set(
        json.loads(get(port, "/openapi.json").body)["paths"]
    )
    numbers = json.loads(re.search(r"NUMBERS = (\[[^\]]*\])", script)[1])
    sent = {*numbers, "model", "stop", "stream", "stream_options"}
    assert sent | {"messages"} <= set(ChatFields.__struct_fields__)
    assert sent | {"prompt"} <= set(CompletionFields.__struct_fields__)


def test_sampling_is_greedy_by_default(page: Elements) -> None:
    """The default is that of `slipstream chat`: sampled answers of small models are incoherent."""
    (temperature,) = [
        attributes for _, attributes in page.found if attributes.get("id") == "temperature"
    ]
    assert temperature["value"] == "0"


def test_pages_need_no_key_because_a_browser_sends_none() -> None:
    context = create_context(access=Access(api_key="user-key"))
    with RunningServer(create_app(ModelRegistry(), ServerState([]), context)) as server:
        assert get(server.port, "/").status == get(server.port, "/docs").status == 200
        assert get(server.port, "/v1/models").status == 401


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")
def test_clearing_a_conversation_during_an_answer_discards_the_answer() -> None:
    command = ["node", str(Path(__file__).with_name("chat_page.mjs")), str(FILE)]
    done = json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )
    assert done["sent"] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]
    assert (done["status"], done["shown"]) == ("", 2)
    assert done["models"] == ["mine", "other", "yours", "ensemble", "tensorrt_llm_bls"], (
        "models with names of their own come first"
    )


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_both_colour_schemes_have_enough_contrast(page: Elements) -> None:
    """The ratios are those of WCAG 2: 4.5 for text, 3 for the edges of controls."""
    (style,) = page.texts["style"]
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    schemes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks]
    assert len(schemes) == 2
    for colours in schemes:
        for text in ("text", "quiet", "bad"):
            for ground in ("page", "mine", "theirs"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert contrast(colours["on-strong"], colours["strong"]) >= 4.5
        assert contrast(colours["strong"], colours["page"]) >= 4.5
        assert contrast(colours["line"], colours["page"]) >= 3
