"""Factories of models: a factory claims models of a repository and creates them.

    class PythonModels(ModelFactory):
        def claims(self, model): return model.config.backend == "python" and …
        async def load(self, model, version, registry): …  # returns a ServedModel

An InferenceError of `load` is the reason why the model is UNAVAILABLE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from slipstream.repository.models import RepositoryModel
from slipstream.server.kserve.inference import ModelRegistry, ServedModel
from slipstream.server.kserve.repository_control import NoControl, RepositoryControl
from slipstream.server.metrics.prometheus_text import Family


class ModelFactory(ABC):
    # repository control, for models that load others; the server replaces it
    control: RepositoryControl = NoControl()
    # whether clients may send the files of models, which may be code
    accepts_files = False

    @abstractmethod
    def claims(self, model: RepositoryModel) -> bool:
        """Return whether this factory creates the model."""
        ...

    @abstractmethod
    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> ServedModel:
        """Return a version of the model. The registry is for models that call others."""
        ...

    def metric_families(self) -> Iterable[Family]:
        """Return the metrics of the factory's models."""
        return ()


def find_factory(factories: Sequence[ModelFactory], model: RepositoryModel) -> ModelFactory | None:
    return next((factory for factory in factories if factory.claims(model)), None)
