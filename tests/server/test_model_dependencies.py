"""Loads and unloads of models that ensembles use: the same models serve as with Triton."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest
import scripted_engine
from dependent_models import BROKEN, CODE, SCENARIOS, Step, write_repository
from tiny_server import make_repository

from slipstream.repository.config import ModelConfig
from slipstream.repository.models import RepositoryModel
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ServedModel,
)
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory
from slipstream.server.options import ControlMode


class Echo(ServedModel):
    """Returns its input. `closing`: its processes end when this is set."""

    def __init__(self, config: ModelConfig, closing: asyncio.Event) -> None:
        self.config = config
        self._closing = closing

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        given = request.inputs["text_input"]
        yield InferResponse([Tensor("text_output", "BYTES", given.shape, given.data)], final=True)

    async def close(self) -> None:
        await self._closing.wait()


class Echoes(ModelFactory):
    """Creates the models whose code is not broken."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.closing.set()

    def claims(self, model: RepositoryModel) -> bool:
        return model.config.backend == "python"

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> ServedModel:
        if (model.folder / "1" / "model.py").read_text() == BROKEN:
            raise InferenceError("broken")
        return Echo(model.config, self.closing)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "models")


def make_loader(repository: Path, registry: ModelRegistry, factory: Echoes) -> ModelLoader:
    engines = EnginePool({}, Supervision(), ())
    return ModelLoader([repository], registry, engines, [factory], "explicit")


async def perform(loader: ModelLoader, repository: Path, step: Step) -> None:
    if step.action in ("break", "repair"):
        text = BROKEN if step.action == "break" else CODE
        (repository / step.model / "1" / "model.py").write_text(text)
    elif step.action == "load":
        with suppress(InferenceError):  # the states show whether it failed
            await loader.load(step.model)
    else:
        await loader.unload(step.model, unload_dependents=step.action != "unload")


@pytest.mark.parametrize("name", SCENARIOS)
async def test_models_that_serve_after_each_step(repository: Path, name: str) -> None:
    registry = ModelRegistry()
    loader = make_loader(repository, registry, Echoes())
    for step in SCENARIOS[name]:
        await perform(loader, repository, step)
        states = {row["name"]: row for row in loader.index()}
        ready = [name for name, row in states.items() if row.get("state") == "READY"]
        assert ready == step.ready.split(), step
        assert ready == [entry.name for entry in registry]
        reasons = {row["reason"] for row in states.values() if "reason" in row}
        assert reasons <= {"unloaded", "Invalid argument: broken"}
    await loader.close()


def tiny_loader(folder: Path, engine: str, mode: ControlMode) -> ModelLoader:
    """Return the loader of a repository with a text model, whose engine starts as its name says."""
    repository = make_repository(folder, engine)
    command = (sys.executable, str(Path(scripted_engine.__file__)))
    engines = EnginePool({}, Supervision(), command)
    return ModelLoader([repository], ModelRegistry(), engines, [], mode)


def count_starts(folder: Path, engine: str) -> int:
    return len((folder / "engines" / engine / "starts").read_text().splitlines())


async def test_an_engine_that_fails_is_started_once_for_all_models_that_use_it(
    tmp_path: Path,
) -> None:
    loader = tiny_loader(tmp_path, "bad", "none")
    reading = loader.read()
    failed = await loader.load_all(list(reading.repository.models), reading)
    assert set(failed) == {"tensorrt_llm", "counter", "ensemble"}
    assert all("this engine folder is bad by order" in reason for reason in failed.values())
    assert count_starts(tmp_path, "bad") == 1
    await loader.close()


async def test_models_serve_once_an_engine_that_was_killed_while_loading_is_loaded(
    tmp_path: Path,
) -> None:
    loader = tiny_loader(tmp_path, "killed", "explicit")
    reading = loader.read()
    failed = await loader.load_all(list(reading.repository.models), reading)
    assert set(failed) == {"tensorrt_llm", "counter", "ensemble"}
    assert "killed by SIGKILL" in failed["counter"]
    assert not loader.models_ready
    await loader.load("tensorrt_llm")
    assert {row["state"] for row in loader.index()} == {"READY"}
    assert loader.models_ready
    assert count_starts(tmp_path, "killed") == 2
    for name in failed:
        await loader.unload(name)
    await loader.close()


async def test_failed_part_is_named_and_the_other_parts_are_loaded(repository: Path) -> None:
    loader = make_loader(repository, ModelRegistry(), Echoes())
    (repository / "a" / "1" / "model.py").write_text(BROKEN)
    with pytest.raises(InferenceError) as caught:
        await loader.load("ens")
    assert caught.value.message == (
        "load failed for model 'ens': ensemble 'ens' depends on 'a' which has no loaded version. "
        "Model 'a' loading failed with error: version 1 is at UNAVAILABLE state: "
        "Invalid argument: broken;\n"
    )
    assert loader.index() == [
        {
            "name": "a",
            "version": "1",
            "state": "UNAVAILABLE",
            "reason": "Invalid argument: broken",
        },
        {"name": "b", "version": "1", "state": "READY"},
        {"name": "ens"},
        {"name": "outer"},
    ]


async def test_model_is_unloading_until_its_processes_have_ended(repository: Path) -> None:
    factory = Echoes()
    loader = make_loader(repository, ModelRegistry(), factory)
    await loader.load("a")
    factory.closing.clear()
    await loader.unload("a")
    assert loader.index()[0] == {"name": "a", "version": "1", "state": "UNLOADING"}
    assert not loader.models_ready
    factory.closing.set()
    await asyncio.sleep(0.01)
    assert loader.index()[0]["reason"] == "unloaded"
    assert loader.models_ready


async def test_model_that_is_loaded_again_while_it_unloads_stays_ready(repository: Path) -> None:
    factory = Echoes()
    loader = make_loader(repository, ModelRegistry(), factory)
    await loader.load("a")
    factory.closing.clear()
    await loader.unload("a")
    await loader.load("a")
    factory.closing.set()
    await asyncio.sleep(0.01)
    assert loader.index()[0] == {"name": "a", "version": "1", "state": "READY"}
