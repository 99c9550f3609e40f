"""The models that OpenAI's clients can name: those that make text from text, and the adapters of their engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.server.adapters import AdapterUse
from slipstream.server.inference import ServedModel, WrappedModel
from slipstream.server.llm_models import TextModel
from slipstream.server.openai.errors import ApiError
from slipstream.server.registry import ModelRegistry, ModelVersion
from slipstream.server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NamedModel:
    """What a request's `model` stands for."""

    id: str
    entry: ModelVersion
    text: TextModel
    is_adapter: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.generator.tokenizer

    @property
    def vocab_size(self) -> int:
        info = self.text.generator.engine.info
        return self.tokenizer.vocab_size if info is None else info.vocab_size

    @property
    def longest_prompt(self) -> int:
        """In tokens; one more must fit behind it."""
        info, built = self.text.generator.engine.info, self.text.engine.engine.build.max_input_len
        return built if info is None else min(built, info.max_sequence_tokens - 1)

    def adapter(self) -> AdapterUse | None:
        return self.text.generator.adapters.named(self.id) if self.is_adapter else None

    def document(self, created: int) -> dict[str, Any]:
        parent = {"parent": self.entry.name} if self.is_adapter else {}
        return {"id": self.id, "object": "model", "created": created, "owned_by": "slipstream", **parent}


def named_models(registry: ModelRegistry) -> Iterator[NamedModel]:
    """Each name once; a model's name goes before an adapter's, and an adapter belongs to the first that has it."""
    models = [NamedModel(name, *found) for name in sorted({entry.name for entry in registry})
              if (found := _text_model(registry, name)) is not None]
    yield from models
    taken = {entry.name for entry in registry}
    for model in models:
        for name in model.text.generator.adapters.names():
            if name not in taken:
                taken.add(name)
                yield NamedModel(name, model.entry, model.text, is_adapter=True)


def find_model(registry: ModelRegistry, name: str) -> NamedModel:
    if name in registry and (found := _text_model(registry, name)) is not None:
        return NamedModel(name, *found)
    known = list(named_models(registry))
    model = next((model for model in known if model.id == name), None)
    if model is None:
        there = ", ".join(model.id for model in known) or "none"
        raise ApiError(f"The model '{name[:200]}' does not exist or makes no text from text. There are: {there}",
                       "model", 404, "model_not_found")
    return model


def _text_model(registry: ModelRegistry, name: str) -> tuple[ModelVersion, TextModel] | None:
    """The latest version of a model, and what makes its text; None where somebody else's code does."""
    entry = registry.find(name)
    model: ServedModel = entry.model
    while isinstance(model, WrappedModel):
        model = model.inner
    return (entry, model) if isinstance(model, TextModel) else None
