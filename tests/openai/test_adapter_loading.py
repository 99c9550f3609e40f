"""Adapters loaded and unloaded at run time, and the routes /ping, /version, /load and /metrics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_support import RunningServer, wait_until
from openai_server import Serving, sdk

from slipstream.server.kserve.access import Access
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.services import create_app, create_context
from slipstream.version import VERSION

PROMPT = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
Call = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def guarded_port(serving: Serving) -> Iterator[int]:
    """A server of the same models that needs keys and serves metrics on its HTTP port."""
    context = create_context(access=Access(api_key="user", admin_key="admin"))
    app = create_app(serving.registry, serving.state, context, ServerMetrics())
    with RunningServer(app) as server:
        yield server.port


@pytest.fixture
def call(guarded_port: int) -> Iterator[Call]:
    loaded = []

    def send(action: str, key: str = "admin", **body: Any) -> httpx.Response:
        if action == "load":
            loaded.append(body.get("lora_name"))
        return httpx.post(
            f"http://127.0.0.1:{guarded_port}/v1/{action}_lora_adapter",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=20,
        )

    yield send
    for name in loaded:
        if isinstance(name, str):
            send("unload", lora_name=name)


def message(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.fixture(scope="module")
def folders(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of other weights than `french`, and one that does not fit the model."""
    import torch
    import transformers
    from tiny_adapters import save_adapter

    base = transformers.AutoModelForCausalLM.from_pretrained(
        serving.model_folder, dtype=torch.float32
    )
    root = tmp_path_factory.mktemp("outside")
    for seed, name in ((7, "first"), (8, "second")):
        save_adapter(base, root / name, seed=seed)
    save_adapter(base, root / "large", rank=16)
    return {name: root / name for name in ("first", "second", "large")}


def complete(serving: Serving, model: str) -> str:
    return serving.client.completions.create(model=model, **PROMPT).choices[0].text


def test_a_loaded_adapter_answers_as_the_same_adapter_from_the_folder(serving, call, tmp_path):
    copied = shutil.copytree(serving.model_folder.parent / "adapters" / "french", tmp_path / "copy")
    answer = call("load", lora_name="late", lora_path=str(copied))
    assert answer.text == "Success: LoRA adapter 'late' added successfully."
    assert answer.headers["content-type"] == "text/plain"
    assert complete(serving, "late") == complete(serving, "french") != complete(serving, "chat")
    listed = {model.id: model for model in serving.client.models.list()}
    assert listed["late"].parent == "chat"
    answer = call("unload", lora_name="late")
    assert answer.text == "Success: LoRA adapter 'late' removed successfully."
    assert "late" not in {model.id for model in serving.client.models.list()}
    assert message(call("unload", lora_name="late"))[:2] == (404, "lora_name")


def test_a_name_that_is_loaded_again_never_reuses_the_old_weights(serving, call, folders):
    answers = []
    for name in ("first", "second", "first"):
        assert call("load", lora_name="same", lora_path=str(folders[name])).is_success
        answers.append(complete(serving, "same"))
        assert complete(serving, "same") == answers[-1]  # now from cached blocks
        assert call("unload", lora_name="same").is_success
    assert answers[0] == answers[2] != answers[1]


def test_weights_that_change_under_the_same_path_are_read_again(serving, call, folders, tmp_path):
    folder = shutil.copytree(folders["first"], tmp_path / "changing")
    assert call("load", lora_name="changing", lora_path=str(folder)).is_success
    before = complete(serving, "changing")
    # copies the times as well, so that only the time of the change itself differs
    shutil.copytree(folders["second"], folder, dirs_exist_ok=True)
    assert complete(serving, "changing") != before


def test_an_adapter_whose_folder_is_gone_is_not_found(serving, call, folders, tmp_path):
    folder = shutil.copytree(folders["first"], tmp_path / "gone")
    assert call("load", lora_name="gone", lora_path=str(folder)).is_success
    shutil.rmtree(folder)
    assert "gone" not in {model.id for model in serving.client.models.list()}
    with pytest.raises(openai.NotFoundError, match="'gone' does not exist"):
        complete(serving, "gone")
    assert call("unload", lora_name="gone").is_success


def test_load_inplace_replaces_an_adapter(serving, call, folders):
    assert call("load", lora_name="same", lora_path=str(folders["first"])).is_success
    before = complete(serving, "same")
    again = {"lora_name": "same", "lora_path": str(folders["second"])}
    text = "The lora adapter 'same' has already been loaded."
    assert message(call("load", **again)) == (400, "lora_name", text)
    assert call("load", **again, load_inplace=True).is_success
    assert complete(serving, "same") != before


def test_unloading_does_not_disturb_a_running_request(serving, call, folders):
    assert call("load", lora_name="running", lora_path=str(folders["first"])).is_success
    expected = serving.client.completions.create(
        model="running", prompt="Once", max_tokens=200, temperature=0
    )
    stream = serving.client.completions.create(
        model="running", prompt="Once", max_tokens=200, temperature=0, stream=True
    )
    text = next(stream).choices[0].text
    assert call("unload", lora_name="running").is_success
    assert call("load", lora_name="running", lora_path=str(folders["second"])).is_success
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected.choices[0].text


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({}, 400, "lora_name", "lora_name is required"),
        ({"lora_name": "a"}, 400, "lora_path", "lora_path is required"),
        ({"lora_name": "", "lora_path": "/x"}, 400, "lora_name", "1 to 255 bytes"),
        ({"lora_name": "a\nb", "lora_path": "/x"}, 400, "lora_name", "printable"),
        ({"lora_name": "a", "lora_path": "x"}, 400, "lora_path", "absolute path"),
        ({"lora_name": "a", "lora_path": "/\0"}, 400, "lora_path", "absolute path"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, 404, "lora_path", "holds no adapter"),
        ({"lora_name": "chat", "lora_path": "/x"}, 400, "lora_name", "name of a model"),
        ({"lora_name": "french", "lora_path": "/x"}, 400, "lora_name", "already been loaded"),
        (
            {"lora_name": "a", "lora_path": "/x", "base_model_name": "b"},
            404,
            "base_model_name",
            "'b'",
        ),
    ],
)
def test_a_refused_load_names_the_field(call, body, status, param, text):
    found = message(call("load", **body))
    assert found[:2] == (status, param)
    assert text in found[2]


def test_an_adapter_that_does_not_fit_is_not_loaded(serving, call, folders):
    status, param, text = message(call("load", lora_name="large", lora_path=str(folders["large"])))
    assert (status, param) == (400, "lora_path")
    assert "rank 16" in text
    assert "large" not in {model.id for model in serving.client.models.list()}


def test_a_server_without_keys_loads_no_adapters(serving, folders):
    answer = httpx.post(
        f"http://127.0.0.1:{serving.port}/v1/load_lora_adapter",
        json={"lora_name": "a", "lora_path": str(folders["first"])},
        trust_env=False,
    )
    assert answer.status_code == 403
    assert "--admin-key" in answer.json()["error"]["message"]


def test_only_the_admin_key_loads_adapters(call, folders):
    answer = call("load", key="user", lora_name="a", lora_path=str(folders["first"]))
    assert message(answer) == (403, None, "This API needs the admin key")


# -- the routes around the models


def fetch(port: int, path: str, method: str = "GET") -> httpx.Response:
    headers = {"Authorization": "Bearer user"}
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False)


def test_ping_is_503_while_the_server_drains(serving, guarded_port):
    for method in ("GET", "POST"):
        assert fetch(guarded_port, "/ping", method).status_code == 200
    serving.state.draining = True
    try:
        assert fetch(guarded_port, "/ping").status_code == 503
    finally:
        serving.state.draining = False


def test_version_is_that_of_the_package(guarded_port):
    assert fetch(guarded_port, "/version").json() == {"version": VERSION}


def test_load_counts_requests_in_flight(serving, guarded_port):
    wait_until(lambda: fetch(guarded_port, "/load").json() == {"server_load": 0})
    stream = sdk(guarded_port, "user").completions.create(
        model="chat", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert fetch(guarded_port, "/load").json() == {"server_load": 1}
    stream.close()
    wait_until(lambda: fetch(guarded_port, "/load").json() == {"server_load": 0})


def test_metrics_are_on_the_http_port_only_on_request(serving, guarded_port):
    answer = fetch(guarded_port, "/metrics")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "# TYPE nv_inference_request_success counter" in answer.text
    assert fetch(serving.port, "/metrics").status_code == 404
    assert httpx.get(f"http://127.0.0.1:{guarded_port}/metrics", trust_env=False).status_code == 401
    paths = json.loads(fetch(guarded_port, "/openapi.json").text)["paths"]
    assert {"/ping", "/version", "/load", "/metrics", "/tokenize"} <= set(paths)
