"""Find the folders of models, and of the engines, tokenizers and adapters that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from slipstream.repository.config import CONFIG_NAME, ModelConfig
from slipstream.repository.problems import Problems
from slipstream.repository.roles import Role
from slipstream.weights.engine_config import (
    EngineConfig,
    EngineFolderError,
    find_engine_folder,
    read_engine_config,
)

_VERSION = re.compile(r"[1-9][0-9]*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def model_folders(repository: Path, problems: Problems) -> Iterator[Path]:
    """Yield the folders of a repository that have a configuration, in order."""
    if not repository.is_dir():
        problems.error(repository, 0, "", "no such folder")
        return
    for folder in sorted(repository.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        if not (folder / CONFIG_NAME).is_file():
            problems.warn(folder, 0, "", f"no {CONFIG_NAME} in it: not a model, skipped")
            continue
        yield folder


def find_versions(
    folder: Path, config: ModelConfig, role: Role, problems: Problems
) -> tuple[int, ...]:
    """Return the versions of a model that its version policy selects."""
    present = tuple(
        int(child.name)
        for child in folder.iterdir()
        if child.is_dir() and _VERSION.fullmatch(child.name)
    )
    if not present and role is not Role.OTHER:
        # the version folder of an ensemble is empty, and git does not store empty folders
        if role is not Role.ENSEMBLE:
            problems.warn(folder, 0, "", "no version folder in it: served as version 1")
        present = (1,)
    versions = config.version_policy.choose(present)
    if not versions:
        text = "no version folder"
        if present:
            text = f"the version policy selects none of {sorted(present)}"
        problems.error(config.file, config.line("version_policy"), "version_policy", text)
    return versions


def candidate_folders(value: str, repository: Path, config: ModelConfig) -> list[Path]:
    """Return where a path may point, most likely first.

    A relative path may start at the working folder, the repository or the model's folder.
    """
    # expanduser leaves the home of an unknown user as it is; no such folder exists then
    path = Path(os.path.expanduser(value))
    if path.is_absolute():
        return [path]
    return [Path.cwd() / path, repository / path, config.file.parent / path]


def find_engine(
    config: ModelConfig,
    given: tuple[str, str] | None,
    version: int,
    repository: Path,
    problems: Problems,
) -> EngineConfig | None:
    """Return the config of the engine that `given` (parameter, value) names.

    Without `given` the engine is in the model's version folder. Returns None after reporting why
    the engine cannot be used.
    """
    key = f"parameters.{given[0]}" if given else "parameters.gpt_model_path"
    try:
        if given is None:
            return read_engine_config(_find_engine_in_version(config.file.parent / str(version)))
        return read_engine_config(
            _find_first_engine(candidate_folders(given[1], repository, config))
        )
    except EngineFolderError as error:
        problems.error(config.file, config.line(key), key, str(error))
        return None


def _find_first_engine(candidates: list[Path]) -> Path:
    missing: EngineFolderError | None = None
    for candidate in candidates:
        try:
            return find_engine_folder(candidate)
        except EngineFolderError as error:
            if missing is None or candidate.exists():
                missing = error
    assert missing is not None
    if len(candidates) > 1:
        looked = ", ".join(str(candidate) for candidate in candidates)
        raise EngineFolderError(f"{missing} (looked at {looked})")
    raise missing


def _find_engine_in_version(version_folder: Path) -> Path:
    children = [child.parent for child in version_folder.glob("*/config.json")]
    if not (version_folder / "config.json").is_file() and len(children) == 1:
        return children[0]
    return find_engine_folder(version_folder)


def find_tokenizer(
    config: ModelConfig | None,
    value: str | None,
    engine: Path,
    repository: Path,
    problems: Problems,
) -> Path:
    """Return the folder that `tokenizer_dir` names, or the engine folder if it has no tokenizer."""
    if config is None or value is None:
        return engine
    for candidate in candidate_folders(value, repository, config):
        if any((candidate / name).is_file() for name in TOKENIZER_FILES):
            return candidate
    key = "parameters.tokenizer_dir"
    text = f"no tokenizer files at '{value}'"
    if any((engine / name).is_file() for name in TOKENIZER_FILES):
        problems.warn(
            config.file, config.line(key), key, f"{text}; using the engine's own tokenizer"
        )
    else:
        problems.error(
            config.file, config.line(key), key, f"{text}, and the engine folder {engine} has none"
        )
    return engine


def find_adapters(
    config: ModelConfig, value: str | None, repository: Path, problems: Problems
) -> Path | None:
    """Return the folder that `lora_prefetch_dir` names, or None."""
    if not value:
        return None
    candidates = candidate_folders(value, repository, config)
    found = next((candidate for candidate in candidates if candidate.is_dir()), None)
    if found is None:
        key = "parameters.lora_prefetch_dir"
        problems.error(config.file, config.line(key), key, f"no folder at '{value}'")
    return found
