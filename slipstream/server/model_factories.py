"""The seam for models that others bring: a factory says which models of a repository it serves, and
makes them.

    class PythonModels:
        def claims(self, model): return model.config.backend == "python" and …
        async def load(self, model, version, registry): …  # a ServedModel; `registry` for models that call models

What `load` raises as an InferenceError is why the model is UNAVAILABLE. A served model with an
`async def close()` is closed when it is unloaded, after its requests have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from slipstream.repository.models import RepositoryModel
from slipstream.server.kserve.inference import ServedModel

if TYPE_CHECKING:
    from slipstream.server.kserve.registry import ModelRegistry


class ModelFactory(Protocol):
    def claims(self, model: RepositoryModel) -> bool:
        """Whether this factory serves the model, whatever role its tensors would give it."""
        ...

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> ServedModel: ...


class NamedModels:
    """A factory of given models, by name."""

    def __init__(self, makers: Mapping[str, Callable[[RepositoryModel, int], ServedModel]]) -> None:
        self._makers = makers

    def claims(self, model: RepositoryModel) -> bool:
        return model.name in self._makers

    async def load(
        self, model: RepositoryModel, version: int, registry: ModelRegistry
    ) -> ServedModel:
        return self._makers[model.name](model, version)


def claiming(factories: Sequence[ModelFactory], model: RepositoryModel) -> ModelFactory | None:
    return next((factory for factory in factories if factory.claims(model)), None)
