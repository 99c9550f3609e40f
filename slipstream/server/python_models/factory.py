"""Starts the Python models of a repository. Only a server with the flag that allows it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.repository.config import ModelConfig
from slipstream.repository.models import RepositoryModel
from slipstream.repository.own_code import code_file, has_own_code
from slipstream.repository.roles import Role
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ServedModel
from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.models.factories import ModelFactory
from slipstream.server.python_models.calls import PythonModelContext
from slipstream.server.python_models.custom_metrics import CustomMetrics
from slipstream.server.python_models.model import PythonModel
from slipstream.server.python_models.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from slipstream.server.kserve.inference import ModelRegistry


async def open_python_model(
    config: ModelConfig, version_folder: Path, context: PythonModelContext
) -> PythonModel:
    """Return a model with all its processes running.

    Raises InferenceError with the model's own reason where it cannot start.
    """
    if config.parameters.get("EXECUTION_ENV_PATH"):
        text = "EXECUTION_ENV_PATH is not supported: install what the model needs beside the server"
        raise InferenceError(f"model '{config.name}': {text}", Code.UNSUPPORTED)
    model = PythonModel(config, version_folder, context)
    await model.start()
    return model


class PythonModels(ModelFactory):
    """A `ModelFactory` for every model of the backend `python` that has its own code.

    The engine model is never one of them: upstream's `model.py` for it drives another engine.
    """

    accepts_files = True

    def __init__(self, limiter: RateLimiter | None = None, complete_config: bool = True) -> None:
        self._limiter = limiter
        self._complete_config = complete_config
        self.metrics = CustomMetrics()  # metrics that the models define

    def claims(self, model: RepositoryModel) -> bool:
        if model.config.backend != "python" or model.role is Role.ENGINE:
            return False
        return has_own_code(model)

    def metric_families(self) -> Iterator[Family]:
        return self.metrics.families()

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> ServedModel:
        context = PythonModelContext(
            registry.find, self.control, self.metrics, self._limiter, self._complete_config
        )
        return await open_python_model(model.config, code_file(model, version).parent, context)
