"""The role of each model of a repository, found from its tensors and not from its name.

Tensor names differ between releases of the repositories. The tables of `request_fields` translate
them to one set of field names, those of the generate endpoint.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum

from slipstream.repository.config import ModelConfig
from slipstream.request_fields.table import (
    ALIASES,
    BLS_INPUTS,
    ENGINE_FIELDS,
    PREPROCESSING_FIELDS,
)

ENGINE_BACKENDS = ("tensorrtllm", "inflight_batcher_llm")


class Role(StrEnum):
    PREPROCESSING = "preprocessing"
    ENGINE = "engine"
    POSTPROCESSING = "postprocessing"
    ENSEMBLE = "ensemble"  # ensemble of other models
    BLS = "bls"  # one model that runs preprocessing, the engine and postprocessing
    OTHER = "other"  # any other model, such as a user's Python model


POSTPROCESSING_FIELDS = {
    "OUTPUT": "text_output",
    "OUT_CUM_LOG_PROBS": "cum_log_probs",
    "OUT_OUTPUT_LOG_PROBS": "output_log_probs",
    "OUT_CONTEXT_LOGITS": "context_logits",
    "OUT_GENERATION_LOGITS": "generation_logits",
}


@dataclass(frozen=True)
class TextFields:
    """The tensors of a text-to-text model: name in requests → request field."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def find_role(config: ModelConfig) -> Role:
    """Return the role of a model, by its backend and the names of its tensors."""
    if config.is_ensemble:
        return Role.ENSEMBLE
    inputs = config.input_names
    outputs = config.output_names
    if {"input_ids", "request_output_len"} <= inputs and "output_ids" in outputs:
        return Role.ENGINE
    if config.backend in ENGINE_BACKENDS:
        return Role.ENGINE  # the reader of engines reports the missing tensors
    if config.backend != "python":
        return Role.OTHER
    if "QUERY" in inputs and "INPUT_ID" in outputs:
        return Role.PREPROCESSING
    if "TOKENS_BATCH" in inputs and "OUTPUT" in outputs:
        return Role.POSTPROCESSING
    if {"text_input", "max_tokens"} <= inputs <= BLS_INPUTS and "text_output" in outputs:
        return Role.BLS
    return Role.OTHER


def engine_fields(config: ModelConfig) -> dict[str, str]:
    """Return the inputs of an engine model: name in requests → request field."""
    return {name: ENGINE_FIELDS.get(name, name) for name in config.input_names}


def engine_outputs(config: ModelConfig) -> dict[str, str]:
    """Return the outputs of an engine model: field → name in responses."""
    names = {name: name for name in config.output_names}
    return {**names, "output_log_probs": "log_probs"} if is_gpt_repository(config) else names


def is_gpt_repository(config: ModelConfig) -> bool:
    """Return whether an engine model is the gpt repository's, which answers a batch as a whole."""
    return "log_probs" in config.output_names


def takes_comma_words(preprocessing: ModelConfig) -> bool:
    """Return whether one string holds all words of a list, separated by commas, as before 0.6.

    In those releases the word lists were required inputs.
    """
    return any(
        tensor.name == "STOP_WORDS_DICT" and not tensor.optional for tensor in preprocessing.inputs
    )


def bls_fields(config: ModelConfig) -> TextFields:
    """Return the fields of a BLS model's tensors."""
    inputs = {name: ALIASES.get(name, name) for name in config.input_names}
    return TextFields(inputs, {name: name for name in config.output_names})


def ensemble_fields(config: ModelConfig, roles: Mapping[str, Role]) -> TextFields:
    """Return the fields of an ensemble's tensors, found through the steps that they are mapped to.

    A tensor that no known step uses keeps its name. A request with such a tensor is rejected.
    """
    inputs = {name: name for name in config.input_names}
    outputs = {name: name for name in config.output_names}
    for step in config.ensemble_steps:
        role = roles.get(step.model_name)
        if role is Role.PREPROCESSING:
            for tensor, name in _mapped_to(step.input_map, inputs):
                inputs[name] = PREPROCESSING_FIELDS.get(tensor, tensor)
        elif role is Role.ENGINE:
            for tensor, name in _mapped_to(step.input_map, inputs):
                # a tensor that preprocessing also reads already has its field
                if inputs[name] == name:
                    inputs[name] = ENGINE_FIELDS.get(tensor, tensor)
            for tensor, name in _mapped_to(step.output_map, outputs):
                outputs[name] = tensor
        elif role is Role.POSTPROCESSING:
            for tensor, name in _mapped_to(step.output_map, outputs):
                outputs[name] = POSTPROCESSING_FIELDS.get(tensor, tensor)
    return TextFields(inputs, outputs)


def _mapped_to(tensors: Mapping[str, str], names: Container[str]) -> list[tuple[str, str]]:
    """Return the (tensor of the step, tensor of the ensemble) pairs whose second is in `names`."""
    return [(tensor, name) for tensor, name in tensors.items() if name in names]
