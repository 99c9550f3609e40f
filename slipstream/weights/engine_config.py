"""Read and check an engine folder's config.json without torch, for the server process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.kernels.block_sizes import BLOCK_SIZES
from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import DTYPE_CODES, PLAIN_FORMS, Quantisation, StoredRows

# Versions of the folder's format; others are refused. A folder has the lowest version that can
# describe it, so that older releases can read it if possible.
FORMAT = 1
FORMAT_STORED = 2  # matrices in the form of a GGUF file
CONFIG_NAME = "config.json"
_REBUILD = "import the model again, or build the engine again from its checkpoint"


class EngineFolderError(ValueError):
    """The folder cannot be used as an engine. The text is one line with the file and a remedy."""


@dataclass(frozen=True)
class BuildLimits:
    """The limits of an engine. Lengths are in tokens."""

    max_input_len: int
    max_seq_len: int
    max_batch_size: int = 64
    max_num_tokens: int = 8192
    max_beam_width: int = 1
    # limits that the user of the build gave, even if they are the same as the defaults
    given: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def for_model(cls, spec: ModelSpec) -> BuildLimits:
        return cls(max_input_len=spec.max_positions, max_seq_len=spec.max_positions)

    def chosen(self, name: str) -> int | None:
        """Return a limit that somebody chose; None: it is a default.

        Folders of earlier releases do not say what was given: other values than the default were.
        """
        value: int = getattr(self, name)
        return value if name in self.given or value != getattr(type(self), name) else None

    def to_config(self) -> dict[str, int]:
        """Return the numbers, as config.json holds them."""
        numbers = asdict(self)
        del numbers["given"]
        return numbers


@dataclass(frozen=True)
class GenerationDefaults:
    end_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None


@dataclass(frozen=True)
class PoolingDefaults:
    """What the source says about embeddings and scores."""

    kind: str  # one of POOLING_KINDS; empty: not declared
    normalize: bool = True  # whether embeddings have unit length
    generates: bool = True  # whether the model has an output layer for logits
    problem: str = ""  # why the declared pooling cannot be used


@dataclass(frozen=True)
class EngineConfig:
    path: Path  # folder of config.json
    spec: ModelSpec
    dtype: str  # "bfloat16", "float16" or "float32"
    quantisation: Quantisation
    build: BuildLimits
    generation: GenerationDefaults
    content_hash: str
    files: dict[str, str]  # name → SHA-256 of every other file of the folder
    inputs_hash: str  # "request" in config.json; the same build need not run again
    pooling: PoolingDefaults | None = None  # None: the source declares nothing
    # ranks that the user of the build wanted; the folder is whole and runs with any number
    wanted_ranks: int = 1
    source: str = ""  # where the weights came from; empty: not recorded


def read_engine_config(path: str | Path) -> EngineConfig:
    """Return the config of an engine folder, or raise EngineFolderError with one line."""
    folder = find_engine_folder(Path(path))
    config_path = folder / CONFIG_NAME
    config = _load_json(config_path)
    own = config.get("slipstream")
    if not isinstance(own, dict) or "pretrained_config" not in config:
        raise EngineFolderError(
            f"{config_path}: not an engine of Slipstream ({_describe_foreign(config)}); {_REBUILD}"
        )
    if own.get("format") not in (FORMAT, FORMAT_STORED):
        raise EngineFolderError(
            f"{config_path}: engine format {own.get('format')!r}, this release reads {FORMAT} and "
            f"{FORMAT_STORED}; upgrade slipstream, or {_REBUILD}"
        )
    try:
        return _parse(folder, config, own)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise EngineFolderError(f"{config_path}: damaged: {reason}; {_REBUILD}") from error


def weight_bytes(folder: Path) -> int:
    """Return the size of the weights of an engine folder; 0: it has none."""
    return sum(file.stat().st_size for file in folder.glob("rank*.engine"))


def find_engine_folder(path: Path) -> Path:
    """Return the engine folder that a path means.

    That is the folder itself, its only `*-gpu` child (trtllm-build writes such folders), or its
    parent if the path is a missing `N-gpu` folder.
    """
    if (path / CONFIG_NAME).is_file():
        return path
    children = [child for child in path.glob("*-gpu") if (child / CONFIG_NAME).is_file()]
    if len(children) == 1:
        return children[0]
    if path.name.endswith("-gpu") and (path.parent / CONFIG_NAME).is_file():
        return path.parent
    what = "no such folder" if not path.exists() else f"no {CONFIG_NAME} in it"
    raise EngineFolderError(f"{path}: not an engine folder: {what}; {_REBUILD}")


def config_document(
    version: str,
    spec: ModelSpec,
    dtype: str,
    quantisation: Quantisation,
    limits: BuildLimits,
    generation: GenerationDefaults,
    own: dict[str, Any],
    wanted_ranks: int = 1,
) -> dict[str, Any]:
    """Return the content of config.json, as `read_engine_config` reads it."""
    return {
        "version": version,
        "pretrained_config": {
            **spec.to_config(),
            "dtype": dtype,
            "logits_dtype": "float32",
            "mapping": {"world_size": wanted_ranks, "tp_size": wanted_ranks, "pp_size": 1},
            "quantization": {
                "quant_algo": quantisation.algorithm,
                "group_size": quantisation.group_size,
                "kv_cache_quant_algo": quantisation.kv_cache,
                "exclude_modules": list(quantisation.excluded),
                **({"stored": quantisation.stored} if quantisation.stored else {}),
            },
        },
        "build_config": limits.to_config(),
        "generation": {**asdict(generation), "end_ids": list(generation.end_ids)},
        "slipstream": {
            "format": folder_format(quantisation),
            "given_limits": list(limits.given),
            **own,
        },
    }


def folder_format(quantisation: Quantisation) -> int:
    """Return the version of the format of a folder with these weights."""
    return FORMAT_STORED if quantisation.stored else FORMAT


def _parse(folder: Path, config: dict[str, Any], own: dict[str, Any]) -> EngineConfig:
    pretrained = config["pretrained_config"]
    generation = config["generation"]
    quantisation = pretrained["quantization"]
    if pretrained["dtype"] not in DTYPE_CODES:
        raise ValueError(f"dtype {pretrained['dtype']!r} is not one of {', '.join(DTYPE_CODES)}")
    if quantisation["quant_algo"] not in (None, "W8A16", "W4A16", "FP8", "GGUF"):
        raise ValueError(
            f"quantisation {quantisation['quant_algo']!r} is not known to this release"
        )
    known = config["build_config"].keys() & (BuildLimits.__dataclass_fields__.keys() - {"given"})
    return EngineConfig(
        path=folder,
        spec=ModelSpec.from_config(pretrained),
        dtype=pretrained["dtype"],
        quantisation=Quantisation(
            quantisation["quant_algo"],
            quantisation["group_size"],
            quantisation.get("kv_cache_quant_algo"),
            tuple(quantisation.get("exclude_modules") or ()),
            _read_stored(quantisation.get("stored") or {}),
        ),
        build=BuildLimits(
            **{name: int(config["build_config"][name]) for name in known},
            given=tuple(own.get("given_limits", ())),
        ),
        generation=GenerationDefaults(
            tuple(generation["end_ids"]), generation["bos_id"], generation["pad_id"]
        ),
        content_hash=own["content_hash"],
        files=dict(own["files"]),
        inputs_hash=own.get("request", ""),
        pooling=read_pooling_defaults(own),
        wanted_ranks=_read_wanted_ranks(pretrained),
        source=str(own.get("source", "")),
    )


def _read_stored(given: dict[str, Any]) -> dict[str, tuple[StoredRows, ...]]:
    stored = {}
    for name, parts in given.items():
        stored[name] = tuple(StoredRows(form, int(rows)) for form, rows in parts)
        forms = {part.form for part in stored[name]}
        if unknown := forms - BLOCK_SIZES.keys() - PLAIN_FORMS:
            raise ValueError(f"{name}: the form {unknown.pop()!r} is not known to this release")
        if not forms or (forms & PLAIN_FORMS and len(parts) > 1):
            raise ValueError(f"{name}: rows of the forms {parts} are not one matrix")
    return stored


def _read_wanted_ranks(pretrained: dict[str, Any]) -> int:
    ranks = pretrained.get("mapping", {}).get("tp_size", 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"mapping: tp_size must be a whole number of at least 1, not {ranks!r}")
    return ranks


def read_pooling_defaults(own: dict[str, Any]) -> PoolingDefaults | None:
    """Return the pooling that a folder's own part of its config.json declares."""
    declared = own.get("pooling")
    return None if declared is None else PoolingDefaults(**declared)


def _load_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineFolderError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EngineFolderError(f"{path}: damaged: not JSON; {_REBUILD}") from error
    if not isinstance(config, dict):
        raise EngineFolderError(f"{path}: damaged: not a JSON object; {_REBUILD}")
    return config


def _describe_foreign(config: dict[str, Any]) -> str:
    if "pretrained_config" in config or "builder_config" in config:
        return "it was compiled by TensorRT-LLM for one GPU and release"
    if "architectures" in config or "model_type" in config:
        return "it is a Hugging Face model"
    if "architecture" in config:
        return "it is a checkpoint"
    return "its config.json is another program's"
