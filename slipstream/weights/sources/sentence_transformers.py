"""How a Hugging Face folder says that its model computes embeddings or scores.

sentence-transformers lists its modules in `modules.json`: the transformer, the pooling, and maybe
a normalisation. A checkpoint with a score layer (`…ForSequenceClassification`) scores texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.weights.engine_config import PoolingDefaults

_MODULES = "modules.json"
_KINDS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_cls_token": "cls",
}
_NEWER = {  # newer spelling of the modes
    "lasttoken": "lasttoken",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
    "cls": "cls_token",
}
_CLASSIFICATION = "ForSequenceClassification"


def has_score_layer(architectures: Sequence[str]) -> bool:
    return any(name.endswith(_CLASSIFICATION) for name in architectures)


def has_output_layer(architectures: Sequence[str]) -> bool:
    """Return whether the checkpoint has a layer for logits. A bare `…Model` has none."""
    return not has_score_layer(architectures) and not any(
        name.endswith("Model") and not name.endswith("HeadModel") for name in architectures
    )


def read_pooling(folder: Path, architectures: Sequence[str]) -> PoolingDefaults | None:
    """Return what the folder declares; None if it declares nothing and the model generates."""
    if has_score_layer(architectures):
        return PoolingDefaults("score", generates=False)
    generates = has_output_layer(architectures)
    modules = _read_list(folder / _MODULES)
    if not modules:
        return None if generates else PoolingDefaults("", generates=False)
    types = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    others = [name for name in types if name not in ("Transformer", "Pooling", "Normalize")]
    if others:
        problem = f"its module {others[0]} of {_MODULES} is not supported"
        return PoolingDefaults("", generates=generates, problem=problem)
    if "Pooling" not in types:
        problem = f"its {_MODULES} has no Pooling"
        return PoolingDefaults("", generates=generates, problem=problem)
    path = str(modules[types.index("Pooling")].get("path", ""))
    kind, problem = _read_kind(folder, path)
    return PoolingDefaults(kind, "Normalize" in types, generates, problem)


def _read_kind(folder: Path, path: str) -> tuple[str, str]:
    """Return the kind of pooling, and why it cannot be used."""
    name = f"{path}/config.json"
    if not path or Path(path).name != path:
        return "", f"the path of its Pooling module is not the name of a folder: {path!r}"
    settings = _read_object(folder / path / "config.json")
    newer = settings.get("pooling_mode")
    if isinstance(newer, str):
        settings = {**settings, f"pooling_mode_{_NEWER.get(newer, newer)}": True}
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in _KINDS:
        found = " and ".join(modes) or "no pooling mode"
        return "", f"{name} asks for {found}; supported: {', '.join(_KINDS)}"
    if settings.get("include_prompt") is False:
        return "", f"{name} leaves prompts out of the pooling (include_prompt)"
    return _KINDS[modes[0]], ""


def _read_list(path: Path) -> list[dict[str, Any]]:
    document = _read(path)
    if not isinstance(document, list):
        return []
    return [item for item in document if isinstance(item, dict)]


def _read_object(path: Path) -> dict[str, Any]:
    document = _read(path)
    return document if isinstance(document, dict) else {}


def _read(path: Path) -> Any:
    """Return a JSON document, None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # reported as a missing pooling mode
