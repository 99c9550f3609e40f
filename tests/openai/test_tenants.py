"""Several API keys: each opens the server, and none finds in the cache what another has asked."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from http_support import RunningServer

from slipstream.cli.keys import read_access, read_api_key
from slipstream.server.grpc.errors import check_access
from slipstream.server.http.routes import create_app
from slipstream.server.kserve.access import TENANT, Access
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.python_models.calls import Calls, Surroundings
from slipstream.server.python_models.frames import Control

KEYS = ("ours", "theirs")


def answer(port: int, path: str, body: dict[str, Any], key: str) -> Any:
    given = httpx.post(
        f"http://127.0.0.1:{port}{path}", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    assert given.status_code == 200, given.text
    return given.json()


def completed(port: int, key: str, prompt: str) -> int:
    body = {"model": "chat", "prompt": prompt, "max_tokens": 1}
    return answer(port, "/v1/completions", body, key)["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


def generated(port: int, key: str, prompt: str) -> int:
    body = {"text_input": prompt, "max_tokens": 1, "return_num_cached_tokens": True}
    return answer(port, "/v2/models/ensemble/generate", body, key)["num_cached_tokens"]


def several(port: int, key: str, prompt: str) -> int:
    """Which run side by side."""
    body = {"model": "chat", "prompt": [prompt, f"other {prompt}"], "n": 2, "max_tokens": 1}
    return answer(port, "/v1/completions", body, key)["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


@pytest.mark.parametrize("ask", [completed, generated, several])
@pytest.mark.parametrize("keys", [KEYS, KEYS[:1]])
def test_what_one_key_computed_another_does_not_find(serving, ask, keys):
    access = Access(api_key="\n".join(keys), admin_key="admin")
    prompt = f"{ask.__name__} {len(keys)} " + "a long beginning " * 12
    app = create_app(serving.registry, serving.state, ServerContext(access=access))
    with RunningServer(app) as server:
        found = [
            ask(server.port, key, prompt)
            for key in ("ours", "ours", keys[-1], keys[-1], "admin", "admin")
        ]
    shared = len(keys) == 1
    assert found[0] == 0
    assert found[1] > 0
    assert (found[2] > 0, found[3] > 0) == (shared, True)
    assert (found[4] > 0, found[5] > 0) == (shared, True)


def test_a_salt_of_the_request_divides_what_is_a_keys_own(serving):
    access = Access(api_key="\n".join(KEYS))
    app = create_app(serving.registry, serving.state, ServerContext(access=access))
    body = {"model": "chat", "prompt": "salted " * 20, "max_tokens": 1}
    with RunningServer(app) as server:
        found = [
            answer(server.port, "/v1/completions", {**body, "cache_salt": salt}, "ours")["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for salt in ("a", "a", "b")
        ]
    assert (found[0], found[1] > 0, found[2]) == (0, True, 0)


def test_grpc_knows_the_tenant_too():
    def tenant(key: str, access: Access) -> str:
        call: Any = SimpleNamespace(metadata=[("authorization", f"Bearer {key}")])
        context = contextvars.copy_context()
        context.run(check_access, call, access, "inference")
        return context.get(TENANT, "")

    several = Access(api_key="ours\ntheirs")
    assert "" != tenant("ours", several) != tenant("theirs", several) != ""
    assert tenant("ours", several) == tenant("ours", several)
    assert "ours" not in tenant("ours", several)
    assert tenant("ours", Access(api_key="ours")) == ""


def test_a_file_has_a_key_a_line_and_clients_take_the_first(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_ADMIN_KEY", raising=False)
    (tmp_path / "keys").write_text("  new \n\nold\n")
    access = read_access(tmp_path / "keys", None)
    assert access.api_keys == ("new", "old")
    assert read_api_key(tmp_path / "keys") == "new"
    headers = [
        {"authorization": f"bearer {key}"} for key in ("new", "old", "new \n\nold", "newold", "")
    ]
    let_in = [access.refuse_http("inference", given.get) is None for given in headers]
    assert let_in == [True, True, False, False, False]


async def test_what_a_python_model_asks_is_nobodys():
    """Its connection was made in the context of whoever had it loaded."""
    seen, answers = [], asyncio.Queue()

    def find(name, version):
        seen.append(TENANT.get())
        raise InferenceError("there is none")

    async def send(message):
        await answers.put(message)
        return 0

    TENANT.set("whoever had it loaded")
    Calls(Surroundings(find), send).begin_control(Control(1, "ready", "m"))
    await answers.get()
    assert seen == [""]
