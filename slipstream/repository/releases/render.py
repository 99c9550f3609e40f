"""Render the config.pbtxt templates of a release, with the template variables of that release."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.repository.releases.tables import (
    RELEASES,
    REPOSITORIES,
    Tensor,
    list_models,
    read_model,
)
from slipstream.repository.releases.wiring import Step, ensemble_steps

_WHAT = {
    "preprocessing": "Text to token ids. Served by Slipstream itself: no model.py is needed.",
    "tensorrt_llm": "The engine: token ids to token ids.",
    "postprocessing": "Token ids to text. Served by Slipstream itself: no model.py is needed.",
    "ensemble": "Text to text: preprocessing, tensorrt_llm and postprocessing, in this order.",
    "tensorrt_llm_bls": "Text to text in one model.",
}
# The batch size of releases in which it was not a variable.
_FIXED_BATCH = {"inflight_batcher_llm": "128", "gpt": "1024"}
_INSTANCE_COUNTS = {
    "preprocessing": "preprocessing_instance_count",
    "postprocessing": "postprocessing_instance_count",
    "tensorrt_llm_bls": "bls_instance_count",
}


def render_template(repository: str, model: str, release: str) -> str:
    """Return the template of one model of `all_models/<repository>`."""
    table = read_model(repository, model, release)
    blocks = [f"# {_WHAT[model]}", "\n".join(_head(repository, model, release))]
    if repository != "gpt" and model in ("tensorrt_llm", "tensorrt_llm_bls"):
        blocks.append("model_transaction_policy { decoupled: ${decoupled_mode} }")
    batching = "\n".join(_batching(repository, model, release))
    blocks += [batching] if batching else []
    blocks.append(_tensor_list("input", table.inputs))
    blocks.append(_tensor_list("output", table.outputs))
    if model == "ensemble":
        names = REPOSITORIES[repository][:4]
        blocks.append(
            _steps(ensemble_steps(*(read_model(repository, name, release) for name in names)))
        )
    else:
        blocks.append(_instances(repository, model, release))
    if table.parameters:
        blocks.append(
            "\n".join(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in table.parameters
            )
        )
    return "\n\n".join(blocks) + "\n"


def find_variable(name: str) -> dict[str, list[str]]:
    """Return the models whose templates have a variable, with the releases that have it."""
    found: dict[str, list[str]] = {}
    for repository, models in REPOSITORIES.items():
        for model in models:
            for release in RELEASES:
                if model not in list_models(repository, release):
                    continue
                releases = found.get(model, [])
                text = render_template(repository, model, release)
                if f"${{{name}}}" in text and release not in releases:
                    found[model] = [*releases, release]
    return found


def _is_early(release: str) -> bool:
    return RELEASES.index(release) <= RELEASES.index("v0.5")


def _head(repository: str, model: str, release: str) -> Iterator[str]:
    yield f'name: "{model}"'
    if model == "ensemble":
        yield 'platform: "ensemble"'
    else:
        yield f'backend: "{_backend(repository, model, release)}"'
    early = repository == "gpt" or _is_early(release)
    yield f"max_batch_size: {_FIXED_BATCH[repository] if early else '${triton_max_batch_size}'}"


def _backend(repository: str, model: str, release: str) -> str:
    if repository == "gpt" or model != "tensorrt_llm":
        return "python"
    if release == "2023-09":
        return "inflight_batcher_llm"
    later = RELEASES.index(release) >= RELEASES.index("v0.10")
    return "${triton_backend}" if later else "tensorrtllm"


def _batching(repository: str, model: str, release: str) -> Iterator[str]:
    if model == "postprocessing" and release == "v0.18":
        yield "dynamic_batching { }"
    if repository == "gpt" or model != "tensorrt_llm" or _is_early(release):
        return
    yield "dynamic_batching {"
    yield "  preferred_batch_size: [ ${triton_max_batch_size} ]"
    yield "  max_queue_delay_microseconds: ${max_queue_delay_microseconds}"
    if release == "v0.18":
        yield "  default_queue_policy { max_queue_size: ${max_queue_size} }"
    yield "}"


def _instances(repository: str, model: str, release: str) -> str:
    fixed = repository == "gpt" or _is_early(release) or model not in _INSTANCE_COUNTS
    count = "1" if fixed else f"${{{_INSTANCE_COUNTS[model]}}}"
    return f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]"


def _tensor_list(kind: str, tensors: tuple[Tensor, ...]) -> str:
    return f"{kind} [\n" + ",\n".join(f"  {{ {_tensor(tensor)} }}" for tensor in tensors) + "\n]"


def _tensor(tensor: Tensor) -> str:
    data_type = tensor.data_type if tensor.data_type.startswith("$") else f"TYPE_{tensor.data_type}"
    parts = [
        f'name: "{tensor.name}"',
        f"data_type: {data_type}",
        f"dims: [ {', '.join(map(str, tensor.dims))} ]",
    ]
    if tensor.scalar:
        parts.append("reshape { shape: [ ] }")
    if tensor.optional:
        parts.append("optional: true")
    if tensor.ragged:
        parts.append("allow_ragged_batch: true")
    return " ".join(parts)


def _steps(steps: tuple[Step, ...]) -> str:
    return (
        "ensemble_scheduling {\n  step [\n" + ",\n".join(_step(step) for step in steps) + "\n  ]\n}"
    )


def _step(step: Step) -> str:
    lines = ["    {", f'      model_name: "{step.model}"', "      model_version: -1"]
    for kind, pairs in (("input_map", step.inputs), ("output_map", step.outputs)):
        lines += [f'      {kind} {{ key: "{tensor}" value: "{name}" }}' for tensor, name in pairs]
    return "\n".join([*lines, "    }"])
