"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's format.

An adapter is loaded when the engine has read it and generated a token with it. A client that loads
adapters may name any folder that the server can read, so both routes need a key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.fields.adapters import AdapterRegistry, holds_adapter
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.generating import EngineBackedModel, ServedEngine, run_to_end
from slipstream.server.openai.errors import ApiError, field_error, rename_in_error
from slipstream.server.openai.fields import convert_fields, decode_object
from slipstream.server.openai.models import find_model, text_models

logger = logging.getLogger(__name__)

API = "model-repository"  # access-control group of both routes
_MAX_NAME_BYTES = 255
_HIGHEST_PRIORITY = 2**31 - 1


class LoadFields(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None  # needed where several engines serve
    load_inplace: bool = False  # replace an adapter that was loaded under this name


class UnloadFields(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None  # of vLLM; no effect
    base_model_name: str | None = None


@dataclass(frozen=True)
class AdapterLoader:
    registry: ModelRegistry
    access: Access

    async def load(self, body: bytes) -> bytes:
        """Load an adapter and return the text that says so."""
        self._require_key()
        fields = convert_fields(decode_object(body), LoadFields)
        name = fields.lora_name
        _check_name(name)
        engine = await self._find_engine(fields.base_model_name)
        self._check_free(fields, engine)
        folder = _read_path(fields.lora_path)
        await _try_adapter(engine, name, folder)
        self._check_free(fields, engine)  # another call may have loaded the name meanwhile
        for adapters in self._registries(engine):
            adapters.add(name, folder)
        logger.info("loaded adapter '%s' of %s from %s", name, engine.model.name, folder)
        return f"Success: LoRA adapter '{name}' added successfully.".encode()

    async def unload(self, body: bytes) -> bytes:
        """Unload an adapter and return the text that says so."""
        self._require_key()
        fields = convert_fields(decode_object(body), UnloadFields)
        name = fields.lora_name
        base = fields.base_model_name
        engines = self._engines() if base is None else [await self._find_engine(base)]
        registries = [found for engine in engines for found in self._registries(engine)]
        if not any(adapters.was_added(name) for adapters in registries):
            raise ApiError(
                f"The lora adapter '{name[:200]}' cannot be found among those loaded at run time.",
                "lora_name",
                404,
            )
        for adapters in registries:
            adapters.remove(name)
        logger.info("unloaded adapter '%s'", name)
        return f"Success: LoRA adapter '{name}' removed successfully.".encode()

    def _require_key(self) -> None:
        if not self.access.guarded and API not in self.access.http_restrictions:
            raise ApiError(
                "Loading adapters at run time needs a server with a key: start it with --admin-key",
                status=403,
            )

    def _engines(self) -> list[ServedEngine]:
        """Return the engines of text models, each once."""
        engines = {
            id(model.text.engine.generator.client): model.text.engine
            for model in text_models(self.registry)
        }
        return list(engines.values())

    async def _find_engine(self, model: str | None) -> ServedEngine:
        if model is not None:
            try:
                found = await find_model(self.registry, model)
            except ApiError as error:
                raise rename_in_error(error, [("model", "base_model_name")]) from error
            return next(
                engine
                for engine in self._engines()
                if engine.generator.client is found.text.engine.generator.client
            )
        engines = self._engines()
        if len(engines) != 1:
            known = ", ".join(model.id for model in text_models(self.registry)) or "none"
            raise field_error("base_model_name", f"is required. Known: {known}")
        return engines[0]

    def _registries(self, engine: ServedEngine) -> Iterator[AdapterRegistry]:
        """Return the registries of all models that use this engine."""
        client = engine.generator.client
        for entry in self.registry:
            model = entry.model.unwrapped
            if isinstance(model, EngineBackedModel) and model.engine.generator.client is client:
                yield model.engine.adapters

    def _check_free(self, fields: LoadFields, engine: ServedEngine) -> None:
        """Refuse a name that a model or another adapter has."""
        name = fields.lora_name
        if name in self.registry:
            raise field_error("lora_name", f"'{name}' is the name of a model")
        for other in self._engines():
            if not other.adapters.has(name):
                continue
            added_here = other.adapters.was_added(name) and other is engine
            if not (fields.load_inplace and added_here):
                raise ApiError(f"The lora adapter '{name}' has already been loaded.", "lora_name")


def _check_name(name: str) -> None:
    if not name or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
        raise field_error(
            "lora_name", f"must have 1 to {_MAX_NAME_BYTES} bytes of printable characters"
        )


def _read_path(text: str) -> Path:
    folder = Path(text)
    if "\0" in text or not folder.is_absolute():
        raise field_error("lora_path", "must be the absolute path of a folder of the server")
    try:
        if not holds_adapter(folder):
            raise ApiError(
                f"lora_path: {text[:200]} holds no adapter (adapter_config.json, "
                "adapter_model.safetensors)",
                "lora_path",
                404,
            )
    except OSError as error:
        raise ApiError(f"lora_path: {error.strerror}: {text[:200]}", "lora_path") from error
    return folder.resolve()


async def _try_adapter(engine: ServedEngine, name: str, folder: Path) -> None:
    """Generate one token with the adapter. Raises ApiError if it does not fit the model."""
    tokenizer = engine.generator.tokenizer
    request = TextRequest(
        [tokenizer.bos_id if tokenizer.bos_id is not None else 0],
        SamplingParams(max_tokens=1),
        ignore_end=True,
        priority=_HIGHEST_PRIORITY,
        adapter=engine.adapters.from_folder(folder, f"adapter '{name}'"),
    )
    try:
        await run_to_end(engine.generator, request)
    except InferenceError as error:
        if error.code is Code.INVALID_ARG:
            raise ApiError(f"lora_path: {error.message}", "lora_path") from error
        raise
