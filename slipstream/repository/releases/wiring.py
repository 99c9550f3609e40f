"""The steps of an ensemble, derived from the tensors that its models have in a release."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.repository.releases.tables import ModelTable

_TEXT_INPUTS = {
    "QUERY": ("text_input", "INPUT_0"),
    "REQUEST_OUTPUT_LEN": ("max_tokens", "INPUT_1"),
    "BAD_WORDS_DICT": ("bad_words", "INPUT_2"),
    "STOP_WORDS_DICT": ("stop_words", "INPUT_3"),
    "EMBEDDING_BIAS_WORDS": ("embedding_bias_words",),
    "EMBEDDING_BIAS_WEIGHTS": ("embedding_bias_weights",),
    "END_ID": ("end_id",),
    "PAD_ID": ("pad_id",),
    "DECODER_QUERY": ("decoder_text_input",),
    "PROMPT_TABLE_EXTRA_ID": ("prompt_table_extra_id",),
}
# Input of the engine → output of preprocessing that feeds it, where both exist.
_FROM_PREPROCESSING = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "stop_words_list": "STOP_WORDS_IDS",
    "bad_words_list": "BAD_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
}
_REQUEST_NAMES = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": "stream",
}
_TO_POSTPROCESSING = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "cum_log_probs": "CUM_LOG_PROBS",
    "output_log_probs": "OUTPUT_LOG_PROBS",
    "context_logits": "CONTEXT_LOGITS",
    "generation_logits": "GENERATION_LOGITS",
}


@dataclass(frozen=True)
class Step:
    model: str
    inputs: tuple[tuple[str, str], ...]  # (tensor of the model, tensor of the ensemble)
    outputs: tuple[tuple[str, str], ...]


def ensemble_steps(
    before: ModelTable, engine: ModelTable, after: ModelTable, ensemble: ModelTable
) -> tuple[Step, Step, Step]:
    """Return the preprocessing, engine and postprocessing steps of an ensemble."""
    fed = {
        tensor: source
        for tensor, source in _FROM_PREPROCESSING.items()
        if tensor in engine.input_names and source in before.output_names
    }
    return (
        Step(
            "preprocessing",
            tuple(_text_inputs(before, ensemble).items()),
            tuple((source, f"_{source}") for source in fed.values()),
        ),
        Step(
            "tensorrt_llm",
            tuple(_engine_inputs(engine, ensemble, fed).items()),
            tuple(_engine_outputs(engine, after, ensemble).items()),
        ),
        Step(
            "postprocessing",
            tuple(
                (name, f"_{name}")
                for name in _TO_POSTPROCESSING.values()
                if name in after.input_names
            ),
            tuple(_text_outputs(after, ensemble).items()),
        ),
    )


def _text_inputs(before: ModelTable, ensemble: ModelTable) -> dict[str, str]:
    found = {}
    for tensor, names in _TEXT_INPUTS.items():
        for name in names:
            if tensor in before.input_names and name in ensemble.input_names:
                found[tensor] = name
    return found


def _engine_inputs(engine: ModelTable, ensemble: ModelTable, fed: dict[str, str]) -> dict[str, str]:
    found = {tensor: f"_{source}" for tensor, source in fed.items()}
    for tensor in engine.inputs:
        for name in (tensor.name, _REQUEST_NAMES.get(tensor.name, tensor.name)):
            if tensor.name not in fed and name in ensemble.input_names:
                found[tensor.name] = name
    return found


def _engine_outputs(engine: ModelTable, after: ModelTable, ensemble: ModelTable) -> dict[str, str]:
    found = {}
    for tensor in engine.outputs:
        through = _TO_POSTPROCESSING.get(tensor.name, "")
        if through in after.input_names:
            found[tensor.name] = f"_{through}"
        elif tensor.name in ensemble.output_names:
            found[tensor.name] = tensor.name
    return found


def _text_outputs(after: ModelTable, ensemble: ModelTable) -> dict[str, str]:
    text = "text_output" if "text_output" in ensemble.output_names else "OUTPUT_0"
    found = {"OUTPUT": text}
    for tensor in after.outputs:
        name = tensor.name.removeprefix("OUT_").lower()
        if tensor.name != "OUTPUT" and name in ensemble.output_names:
            found[tensor.name] = name
    return found
