"""Several API keys: each gives access, and their requests share no cached blocks."""

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
from slipstream.server.kserve.access import TENANT, Access
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.python_models.calls import Calls, PythonModelContext
from slipstream.server.python_models.frames import Control
from slipstream.server.services import create_app, create_context

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
    """Serve requests that run at the same time."""
    body = {"model": "chat", "prompt": [prompt, f"other {prompt}"], "n": 2, "max_tokens": 1}
    return answer(port, "/v1/completions", body, key)["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


@pytest.mark.parametrize("ask", [completed, generated, several])
@pytest.mark.parametrize("keys", [KEYS, KEYS[:1]])
def test_cached_blocks_are_not_shared_between_api_keys(serving, ask, keys):
    access = Access(api_key="\n".join(keys), admin_key="admin")
    prompt = f"{ask.__name__} {len(keys)} " + "a long beginning " * 12
    app = create_app(serving.registry, serving.state, create_context(access=access))
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


def test_cache_salt_separates_requests_of_one_api_key(serving):
    access = Access(api_key="\n".join(KEYS))
    app = create_app(serving.registry, serving.state, create_context(access=access))
    body = {"model": "chat", "prompt": "salted " * 20, "max_tokens": 1}
    with RunningServer(app) as server:
        found = [
            answer(server.port, "/v1/completions", {**body, "cache_salt": salt}, "ours")["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for salt in ("a", "a", "b")
        ]
    assert (found[0], found[1] > 0, found[2]) == (0, True, 0)


def test_cached_blocks_are_not_shared_between_api_keys_over_grpc():
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


def test_a_key_file_has_one_key_per_line_and_clients_use_the_first(tmp_path, monkeypatch):
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


async def test_requests_of_a_python_model_belong_to_no_tenant():
    """The connection to its process is opened in the context of the request that loaded it."""
    seen, answers = [], asyncio.Queue()

    def find(name, version):
        seen.append(TENANT.get())
        raise InferenceError("there is none")

    async def send(message):
        await answers.put(message)
        return 0

    TENANT.set("the tenant that loaded it")
    Calls(PythonModelContext(find), send).begin_control(Control(1, "ready", "m"))
    await answers.get()
    assert seen == [""]
