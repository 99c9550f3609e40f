"""The model loader: polling, version policies, warm-up, failed loads and several repositories."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from slipstream.repository.config import ModelConfig
from slipstream.repository.models import RepositoryModel
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.errors import InferenceError, Unavailable
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ServedModel,
)
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory

CONFIG = """
name: "{name}"
backend: "python"
input {{ name: "x" data_type: TYPE_INT32 dims: [ 2 ] }}
output {{ name: "y" data_type: TYPE_INT32 dims: [ 2 ] }}
{more}
"""


class RecordingModel(ServedModel):
    """A model that records its inputs."""

    decoupled = False
    ready = True

    def __init__(self, config: ModelConfig, version: int) -> None:
        self.config = config
        self.version = version
        self.closed = False
        self.received: list[list[int]] = []

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self.received.append(request.inputs["x"].values())
        if request.inputs["x"].values() == [13, 13]:
            yield InferResponse(error=InferenceError("bad luck"))
        else:
            yield InferResponse([], final=True)

    async def close(self) -> None:
        self.closed = True


class Factory(ModelFactory):
    def __init__(self) -> None:
        self.made: list[RecordingModel] = []

    def claims(self, model: RepositoryModel) -> bool:
        return True

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> RecordingModel:
        self.made.append(RecordingModel(model.config, version))
        return self.made[-1]


@pytest.fixture
def registry() -> ModelRegistry:
    return ModelRegistry()


@pytest.fixture
def factory() -> Factory:
    return Factory()


def loader(
    folder: Path, registry: ModelRegistry, factory: Factory, mode: str = "none"
) -> ModelLoader:
    engines = EnginePool({}, Supervision(), ("false",))
    return ModelLoader([folder], registry, engines, [factory], mode)  # type: ignore[arg-type]


def write(folder: Path, name: str, more: str = "", versions: tuple[int, ...] = (1,)) -> Path:
    for version in versions:
        (folder / name / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / name / "config.pbtxt").write_text(CONFIG.format(name=name, more=more))
    return folder / name


async def load_all(made: ModelLoader) -> dict[str, str]:
    reading = made.read()
    return await made.load_all(list(reading.repository.models), reading)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_polling_loads_new_models_reloads_changed_ones_and_unloads_removed_ones(
    tmp_path: Path, registry: ModelRegistry, factory: Factory
) -> None:
    write(tmp_path, "first")
    made = loader(tmp_path, registry, factory, "poll")
    assert await load_all(made) == {}
    polling = asyncio.ensure_future(made.poll(0.01))
    try:
        write(tmp_path, "second")
        await until(lambda: "second" in registry)
        file = write(tmp_path, "first", "version_policy { all { } }") / "config.pbtxt"
        os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
        await until(lambda: len(factory.made) == 3)
        await until(lambda: factory.made[0].closed)  # the replaced model
        shutil.rmtree(tmp_path / "second")
        await until(lambda: "second" not in registry)
        await until(lambda: factory.made[1].closed)
    finally:
        polling.cancel()
    assert [row for row in made.index() if row["name"] == "first"] == [
        {"name": "first", "version": "1", "state": "READY"}
    ]
    with pytest.raises(Unavailable, match="not allowed if polling"):
        await made.load("first")
    await made.close()
    assert all(model.closed for model in factory.made)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", [4]),
        ("version_policy { latest { num_versions: 2 } }", [2, 4]),
        ("version_policy { all { } }", [1, 2, 4]),
        ("version_policy { specific { versions: [ 1, 2, 9 ] } }", [1, 2]),
    ],
)
async def test_version_policy_selects_the_served_versions(
    tmp_path: Path, registry: ModelRegistry, factory: Factory, policy: str, served: list[int]
) -> None:
    write(tmp_path, "m", policy, (1, 2, 4))
    assert await load_all(loader(tmp_path, registry, factory)) == {}
    assert [int(entry.version) for entry in registry] == served
    assert registry.find("m").version == str(served[-1])
    for version in served:
        found = registry.find("m", str(version)).model
        assert isinstance(found, RecordingModel)
        assert found.version == version
    assert registry.metadata("m")["versions"] == [str(version) for version in served]


WARMUP = (
    'model_warmup {{ name: "w" count: {count} '
    'inputs {{ key: "x" value {{ data_type: TYPE_INT32 dims: [ 2 ] {data} }} }} }}'
)


async def test_warm_up_requests_run_when_a_model_is_loaded(
    tmp_path: Path, registry: ModelRegistry, factory: Factory
) -> None:
    write(tmp_path, "zeros", WARMUP.format(count=3, data="zero_data: true"))
    folder = write(tmp_path, "filed", WARMUP.format(count=1, data='input_data_file: "numbers"'))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "numbers").write_bytes(bytes([7, 0, 0, 0, 8, 0, 0, 0]))
    assert await load_all(loader(tmp_path, registry, factory)) == {}
    received = {model.config.name: model.received for model in factory.made}
    assert received == {"zeros": [[0, 0]] * 3, "filed": [[7, 8]]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('input_data_file: "numbers"', "failed to run warmup sample 'w': bad luck"),
        (
            'input_data_file: "absent"',
            "the file of warmup input 'x' cannot be read: No such file or directory",
        ),
        (
            'input_data_file: "../config.pbtxt"',
            "the file of warmup input 'x' lies outside the model's warmup folder",
        ),
        ('input_data_file: "short"', "warmup input 'x' needs 2 values, its file has 1"),
    ],
)
async def test_failed_warm_up_fails_the_load(
    tmp_path: Path, registry: ModelRegistry, factory: Factory, data: str, reason: str
) -> None:
    folder = write(tmp_path, "m", WARMUP.format(count=1, data=data))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "numbers").write_bytes(bytes([13, 0, 0, 0, 13, 0, 0, 0]))
    (folder / "warmup" / "short").write_bytes(bytes(5))
    made = loader(tmp_path, registry, factory)
    failed = await load_all(made)
    assert reason in failed["m"]
    assert not made.models_ready
    (row,) = made.index()
    assert (row["state"], reason in row["reason"]) == ("UNAVAILABLE", True)
    with pytest.raises(InferenceError, match="'m' has no available versions"):
        registry.find("m")


async def test_failed_reload_keeps_the_loaded_model(
    tmp_path: Path, registry: ModelRegistry, factory: Factory
) -> None:
    write(tmp_path, "m")
    made = loader(tmp_path, registry, factory, "explicit")
    await made.load("m")
    before = registry.find("m").model
    with pytest.raises(InferenceError, match="failed to poll from model repository"):
        await made.load("m", {"name": "m", "backend": "python", "max_batch_size": "many"})
    write(tmp_path, "m", WARMUP.format(count=1, data='input_data_file: "absent"'))
    with pytest.raises(InferenceError, match="cannot be read"):
        await made.load("m")
    assert registry.find("m").model is before
    assert made.index() == [{"name": "m", "version": "1", "state": "READY"}]
    assert made.models_ready


async def test_repositories_are_merged_and_duplicate_names_are_refused(
    tmp_path: Path, registry: ModelRegistry, factory: Factory
) -> None:
    write(tmp_path / "a", "one")
    write(tmp_path / "b", "two")
    engines = EnginePool({}, Supervision(), ("false",))
    made = ModelLoader([tmp_path / "a", tmp_path / "b"], registry, engines, [factory])
    assert await load_all(made) == {}
    assert [row["name"] for row in made.index()] == ["one", "two"]
    write(tmp_path / "b", "one")
    problems = made.read().problems.errors
    assert [problem.text for problem in problems] == [
        f"there is a model 'one' in {tmp_path / 'a'} too"
    ]
