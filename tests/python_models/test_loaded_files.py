"""Loads with files: a client sends the code of a Python model with the load request."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_requests.servers import our_server
from http_support import RunningServer, post, wait_until
from python_model_harness import write_model
from tritonclient.utils import InferenceServerException

from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.repository_control import MAX_FILES
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.services import create_app, create_context

CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        text = np.array([b"TEXT"], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for _ in requests]
"""
TENSOR = {"data_type": "TYPE_STRING", "dims": [-1]}
CONFIG: dict[str, Any] = {
    "backend": "python",
    "input": [{"name": "text_input", **TENSOR}],
    "output": [{"name": "text_output", **TENSOR}],
}


class Server:
    """An HTTP server whose models clients load."""

    def __init__(self, port: int, temporary: Path) -> None:
        self.port = port
        self._temporary = temporary

    def load(self, model: str, files: dict[str, str], config: Any = CONFIG) -> tuple[int, str]:
        parameters = {
            f"file:{path}": base64.b64encode(text.encode()).decode() for path, text in files.items()
        }
        if config is not None:
            parameters["config"] = json.dumps(config)
        return self.control(model, "load", {"parameters": parameters})

    def control(self, model: str, action: str, document: Any = None) -> tuple[int, str]:
        body = json.dumps(document or {}).encode()
        answer = post(self.port, f"/v2/repository/models/{model}/{action}", body)
        return answer.status, json.loads(answer.body)["error"] if answer.body else ""

    def text(self, model: str) -> str:
        body = b'{"text_input": "own"}'
        answer = json.loads(post(self.port, f"/v2/models/{model}/generate", body).body)
        return str(answer.get("text_output", answer.get("error")))

    def folders(self) -> list[Path]:
        """Return the temporary folders that exist."""
        return sorted(self._temporary.iterdir())


def running(repository: Path, factories: list[ModelFactory]) -> Iterator[RunningServer]:
    registry = ModelRegistry()
    pool = EnginePool({}, Supervision(), ())
    loader = ModelLoader([repository], registry, pool, factories, "explicit")
    context = create_context(control=loader)
    with RunningServer(create_app(registry, ServerState([]), context)) as server:
        yield server
        assert server.loop is not None
        asyncio.run_coroutine_threadsafe(loader.close(), server.loop).result(60)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    return write_model(folder, "own", CODE.replace("TEXT", "own"))


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def server(repository: Path, temporary: Path) -> Iterator[Server]:
    for started in running(repository, [PythonModels()]):
        yield Server(started.port, temporary)
    assert list(temporary.iterdir()) == []  # the server has stopped


def code(text: str) -> str:
    return CODE.replace("TEXT", text)


def test_client_loads_its_own_code_and_replaces_it(server: Server) -> None:
    assert server.load("sent", {"1/model.py": code("first")}) == (200, "")
    assert server.text("sent") == "first"
    assert server.load("sent", {"3/model.py": code("second"), "labels.txt": "x"}) == (200, "")
    assert server.text("sent") == "second"
    wait_until(lambda: len(server.folders()) == 1)  # the first one's
    folder = server.folders()[0]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (folder / "sent").iterdir()) == [
        "3",
        "config.pbtxt",
        "labels.txt",
    ]
    assert server.control("sent", "unload") == (200, "")
    wait_until(lambda: server.folders() == [])
    assert server.text("sent") == "Request for unknown model: 'sent' has no available versions"
    reason = "failed to load 'sent', failed to poll from model repository"
    assert server.control("sent", "load") == (500, reason)


def test_files_replace_the_folder_of_the_repository_until_a_load_without_files(
    server: Server,
) -> None:
    assert server.load("own", {"7/model.py": code("sent")}) == (200, "")
    assert server.text("own") == "sent"
    assert server.control("own", "load") == (200, "")
    assert server.text("own") == "own"
    wait_until(lambda: server.folders() == [])
    rows = json.loads(post(server.port, "/v2/repository/index", b"").body)
    assert [row for row in rows if row["name"] == "own"] == [
        {"name": "own", "version": "1", "state": "READY"},
        {"name": "own", "version": "7", "state": "UNAVAILABLE", "reason": "unloaded"},
    ]
    server.control("own", "unload")


def test_load_that_fails_leaves_the_old_model_and_no_folder(server: Server) -> None:
    server.load("sent", {"1/model.py": code("good")})
    kept = server.folders()
    status, reason = server.load("sent", {"1/model.py": "raise RuntimeError('broken')"})
    assert status == 400
    assert "load failed for model 'sent': version 1 is at UNAVAILABLE state" in reason
    assert "broken" in reason
    none = "at least one version must be available under the version policy of model 'sent'"
    assert server.load("sent", {"model.py": code("x")})[1].strip().endswith(none)
    assert server.text("sent") == "good"
    assert server.folders() == kept
    server.control("sent", "unload")
    wait_until(lambda: server.folders() == [])


@pytest.mark.parametrize("path", ["../evil.py", "1/../../evil.py", "/tmp/evil.py", "", "1/a\0b"])
def test_files_stay_in_the_folder_of_the_model(server: Server, path: str) -> None:
    status, reason = server.load("sent", {"1/model.py": code("x"), path: "x"})
    assert status == 400
    assert "is outside of the model's folder; give a relative path without '..'" in reason
    assert server.folders() == []


def test_files_need_a_configuration_and_are_limited(server: Server) -> None:
    reason = "failed to load 'sent', failed to poll from model repository"
    assert server.load("sent", {"1/model.py": code("x")}, None) == (500, reason)
    many = {f"1/{number}": "" for number in range(MAX_FILES + 1)}
    assert f"at most {MAX_FILES} files" in server.load("sent", many)[1]
    assert server.load("a%2Fb", {"1/model.py": code("x")})[0] == 400
    assert server.folders() == []


def test_server_without_python_models_says_that_it_accepts_no_files(repository: Path) -> None:
    for started in running(repository, []):
        server = Server(started.port, repository)
        status, reason = server.load("sent", {"1/model.py": code("x")})
        assert status == 501
        assert reason.startswith("failed to load 'sent': the files of a load request may be code")
        assert "start it with --allow-python-models" in reason


def test_ensemble_of_a_client_comes_back_with_the_model_that_it_uses(server: Server) -> None:
    step = {
        "model_name": "own",
        "model_version": -1,
        "input_map": {"text_input": "text_input"},
        "output_map": {"text_output": "text_output"},
    }
    config = {**CONFIG, "platform": "ensemble", "ensemble_scheduling": {"step": [step]}}
    del config["backend"]
    assert server.load("both", {"1/notes.txt": "x"}, config) == (200, "")
    assert server.text("both") == "own"
    server.control("own", "unload")
    assert server.text("both") == "Request for unknown model: 'both' has no available versions"
    assert server.control("own", "load") == (200, "")
    assert server.text("both") == "own"
    server.control("both", "unload")
    wait_until(lambda: server.folders() == [])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_client_library_loads_files(repository: Path, temporary: Path, protocol: str) -> None:
    with our_server(repository, [PythonModels()]) as ports:
        library = importlib.import_module(f"tritonclient.{protocol}")
        port = ports.http if protocol == "http" else ports.grpc
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            files = {"file:2/model.py": code(protocol).encode()}
            client.load_model("sent", config=json.dumps(CONFIG), files=files)
            given = library.InferInput("text_input", [1], "BYTES")
            given.set_data_from_numpy(np.array([b"x"], dtype=object))
            answer = client.infer("sent", [given])
            assert answer.as_numpy("text_output").tolist() == [protocol.encode()]
            files = {"file:../model.py": b"x"}
            with pytest.raises(InferenceServerException, match="outside of the model's folder"):
                client.load_model("sent", config=json.dumps(CONFIG), files=files)
    assert list(temporary.iterdir()) == []  # the server has stopped
