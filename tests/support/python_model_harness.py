"""Opens the Python models of a folder without a server, and sends requests to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from slipstream.repository.models import RepositoryModel, inspect_repository
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelRegistry,
    ServedModel,
)
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.python_models.model import PythonModel

HERE = Path(__file__).parents[1] / "python_models"
MIMIC = HERE / "repos" / "mimic"
CONFORMANCE = HERE.parent / "conformance"


def models_of(folder: Path) -> dict[str, RepositoryModel]:
    names = [child.name for child in folder.iterdir()]
    repository, _ = inspect_repository(folder, served_elsewhere=names)
    return dict(repository.models)


class Opened:
    """The models of a registry by name, each a PythonModel."""

    def __init__(self, registry: ModelRegistry, factory: PythonModels) -> None:
        self.registry = registry
        self.factory = factory

    def __getitem__(self, name: str) -> PythonModel:
        model = self.registry.find(name).model
        assert isinstance(model, PythonModel)
        return model


@asynccontextmanager
async def open_models(
    folder: Path,
    *names: str,
    others: Sequence[tuple[str, ServedModel]] = (),
    complete_config: bool = True,
) -> AsyncIterator[Opened]:
    registry = ModelRegistry()
    models = models_of(folder)
    factory = PythonModels(complete_config=complete_config)
    for name, model in others:
        registry.add(name, 1, model)
    async with AsyncExitStack() as stack:
        for name in names:
            for version in models[name].versions:
                model = await factory.load(models[name], version, registry)
                assert isinstance(model, PythonModel)
                stack.push_async_callback(model.close)
                registry.add(name, version, model)
        yield Opened(registry, factory)


def text_tensor(
    text: str | bytes, name: str = "text_input", shape: tuple[int, ...] = (1,)
) -> Tensor:
    return Tensor(name, "BYTES", shape, [text if isinstance(text, bytes) else text.encode()])


def text_request(text: str, **fields: Any) -> InferRequest:
    return InferRequest("", "", {"text_input": text_tensor(text)}, **fields)


async def ask(model: ServedModel, request: InferRequest | str) -> list[InferResponse]:
    request = text_request(request) if isinstance(request, str) else request
    return [response async for response in model.infer(request)]


def response_texts(responses: Sequence[InferResponse]) -> list[str]:
    """Return the texts of the responses; errors start with "! "."""
    return [
        f"! {response.error.message}"
        if response.error
        else response.outputs[0].strings()[0].decode()
        for response in responses
    ]


def write_model(folder: Path, name: str, code: str, config: str = "") -> Path:
    """Add a text-to-text model to a repository."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(code)
    tensors = (
        'input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
        'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
    )
    text = f'name: "{name}"\nbackend: "python"\n{config}\n'
    (folder / name / "config.pbtxt").write_text(text + ("" if "input [" in config else tensors))
    return folder
