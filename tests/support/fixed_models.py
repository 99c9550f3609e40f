"""A factory of models that a test makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.repository.models import RepositoryModel
from slipstream.server.kserve.inference import ModelRegistry, ServedModel
from slipstream.server.models.factories import ModelFactory


class FixedModels(ModelFactory):
    """A factory of given models, by name."""

    def __init__(self, makers: Mapping[str, Callable[[RepositoryModel, int], ServedModel]]) -> None:
        self._makers = makers

    def claims(self, model: RepositoryModel) -> bool:
        return model.name in self._makers

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> ServedModel:
        return self._makers[model.name](model, version)
