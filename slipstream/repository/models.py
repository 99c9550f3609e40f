"""The models of a repository folder and how they chain: what the server builds itself from.

`read_repository(path)` reads everything, then raises one RepositoryError with every problem, or
returns a `Repository` whose `warnings` say what was left to defaults. No weights are touched and
nothing is executed: a `model.py` in the repository is only a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.engine.settings import EngineSettings
from slipstream.repository.config import CONFIG_NAME, ModelConfig, QueuePolicy, read_model_config
from slipstream.repository.engine_parameters import Parameters, engine_settings, read_parameters
from slipstream.repository.ensembles import check_graph
from slipstream.repository.folders import find_adapters, find_engine, find_tokenizer
from slipstream.repository.problems import Problem, Problems, RepositoryError
from slipstream.repository.roles import (
    Role,
    TextFields,
    bls_fields,
    ensemble_fields,
    role_of,
    takes_comma_words,
)
from slipstream.weights.engine_config import EngineConfig

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_VERSION = re.compile(r"[1-9][0-9]*")


@dataclass(frozen=True)
class RepositoryModel:
    name: str
    folder: Path
    config: ModelConfig
    role: Role
    versions: tuple[int, ...]  # that the version policy serves, ascending
    parameters: Parameters = field(repr=False, default=Parameters({}))
    # the configuration itself is wrong, so that nothing can be made of the model
    malformed: bool = False


@dataclass(frozen=True)
class EngineModel:
    """An engine model with its paths found and its parameters read."""

    name: str
    engine: EngineConfig
    tokenizer_folder: Path
    settings: EngineSettings
    decoupled: bool
    exclude_input_in_output: bool
    normalize_log_probs: bool
    add_special_tokens: bool
    skip_special_tokens: bool
    queue_policy: QueuePolicy = field(default_factory=QueuePolicy)
    priority_levels: int = 0  # 0: any
    default_priority: int = 0
    adapter_folder: Path | None = None  # holds a folder for each adapter that requests may name


@dataclass(frozen=True)
class TextChain:
    """A text-to-text model: preprocessing, an engine, postprocessing, as an ensemble or behind a
    BLS model.
    """

    name: str
    engine: str  # the engine model's name
    fields: TextFields
    ensemble: bool
    decoupled: bool
    placeholders: bool  # outputs nobody asked for are sent as 0.0, as repositories before 0.14 did
    accumulate_tokens: bool = False
    draft_engine: str = ""  # the engine model that guesses for requests with num_draft_tokens
    comma_words: bool = False  # a text of word lists holds several words, with commas between


@dataclass(frozen=True)
class Repository:
    paths: tuple[Path, ...]
    models: Mapping[str, RepositoryModel]
    engines: Mapping[str, EngineModel]
    chains: Mapping[str, TextChain]  # by the name of the ensemble or the BLS model
    graphs: frozenset[str] = frozenset()  # ensembles of other models, run step by step
    warnings: tuple[Problem, ...] = ()

    def needed_by(self, name: str) -> tuple[str, ...]:
        """The models that one cannot be served without, themselves included, in an order to load
        them in.
        """
        found: dict[str, None] = {}

        def visit(part: str) -> None:
            if part in found or part not in self.models:
                return
            for other in self._parts(part):
                visit(other)
            found[part] = None

        visit(name)
        return tuple(found)

    def _parts(self, name: str) -> Iterator[str]:
        if name in self.chains:
            yield self.chains[name].engine
            if self.chains[name].draft_engine:
                yield self.chains[name].draft_engine
        for step in self.models[name].config.ensemble_steps:
            if step.model_name != name:
                yield step.model_name


Paths = str | Path | Sequence[str | Path]
ServedElsewhere = Collection[str] | Callable[[RepositoryModel], bool]


def read_repository(path: Paths, served_elsewhere: ServedElsewhere = ()) -> Repository:
    """`served_elsewhere` names models the caller brings itself, whatever their configuration says."""
    repository, problems = inspect_repository(path, served_elsewhere)
    if problems.errors:
        raise RepositoryError(problems.errors)
    return repository


def inspect_repository(
    path: Paths,
    served_elsewhere: ServedElsewhere = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Repository, Problems]:
    """The repository as far as it can be read, and everything there is to say about it.

    `overrides` are configurations (as JSON has them) that stand in for the files of the models they
    name.
    """
    folders = _folders(path)
    problems = Problems()
    models: dict[str, RepositoryModel] = {}
    for folder in folders:
        for model in _read_models(folder, overrides or {}, problems):
            if model.name in models:
                other = models[model.name].folder.parent
                problems.error(
                    model.folder, 0, "", f"there is a model '{model.name}' in {other} too"
                )
            models.setdefault(model.name, model)
    if not models and not problems.errors:
        places = ", ".join(str(folder) for folder in folders)
        problems.error(places, 0, "", f"no model in it (a model is a folder with {CONFIG_NAME})")
    elsewhere = _claims(served_elsewhere)
    ours = {name: model for name, model in models.items() if not elsewhere(model)}
    engines = dict(_read_engines(ours, models, problems))
    chains = dict(_read_chains(ours, problems))
    graphs = frozenset(
        name for name, model in ours.items() if model.role is Role.ENSEMBLE and name not in chains
    )
    for name in sorted(graphs):
        check_graph(
            models[name].config, {other: model.config for other, model in models.items()}, problems
        )
    _report_unknown(ours, problems)
    models = {
        name: _with_batch_size(model, engines, chains, problems) for name, model in models.items()
    }
    return Repository(folders, models, engines, chains, graphs, problems.warnings), problems


def _folders(path: Paths) -> tuple[Path, ...]:
    return (Path(path),) if isinstance(path, (str, Path)) else tuple(Path(one) for one in path)


def _claims(served_elsewhere: ServedElsewhere) -> Callable[[RepositoryModel], bool]:
    if callable(served_elsewhere):
        return served_elsewhere
    names = served_elsewhere
    return lambda model: model.name in names


def _report_unknown(models: Mapping[str, RepositoryModel], problems: Problems) -> None:
    for name, model in models.items():
        if model.role is not Role.OTHER or model.malformed:
            continue
        backend = model.config.backend or model.config.platform
        text = f"unable to find backend library for backend '{backend}', try specifying runtime on the model"
        text += " configuration."
        if backend == "python":
            text = f"model '{name}' is none of the known roles, and code from a repository is not executed"
        problems.error(model.config.file, 0, "", text)


def _read_models(
    repository: Path, overrides: Mapping[str, Mapping[str, Any]], problems: Problems
) -> Iterator[RepositoryModel]:
    if not repository.is_dir():
        problems.error(repository, 0, "", "no such folder")
        return
    for folder in sorted(repository.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        if not (folder / CONFIG_NAME).is_file():
            problems.warn(folder, 0, "", f"no {CONFIG_NAME} in it: not a model, skipped")
            continue
        known = len(problems.errors)
        config = read_model_config(folder, problems, overrides.get(folder.name))
        if config is None:
            continue
        if not _NAME.fullmatch(folder.name):
            problems.error(
                folder, 0, "", "a model's name may hold letters, digits, '.', '_' and '-'"
            )
        malformed = len(problems.errors) > known
        role = role_of(config)
        parameters = read_parameters(config, role, problems)
        versions = _versions(folder, config, role, problems)
        yield RepositoryModel(folder.name, folder, config, role, versions, parameters, malformed)


def _versions(folder: Path, config: ModelConfig, role: Role, problems: Problems) -> tuple[int, ...]:
    present = tuple(
        int(child.name)
        for child in folder.iterdir()
        if child.is_dir() and _VERSION.fullmatch(child.name)
    )
    if not present and role is not Role.OTHER:
        if role is not Role.ENSEMBLE:  # an ensemble's folder is empty, and git drops empty folders
            problems.warn(folder, 0, "", "no version folder in it: served as version 1")
        present = (1,)
    versions = config.version_policy.choose(present)
    if not versions:
        text = (
            "no version folder"
            if not present
            else f"the version policy leaves none of {sorted(present)}"
        )
        problems.error(config.file, config.line("version_policy"), "version_policy", text)
    return versions


def _read_engines(
    ours: Mapping[str, RepositoryModel], models: Mapping[str, RepositoryModel], problems: Problems
) -> Iterator[tuple[str, EngineModel]]:
    for model in ours.values():
        if model.role is Role.ENGINE:
            engine = _read_engine(model.folder.parent, model, models, problems)
            if engine is not None:
                yield model.name, engine


def _read_engine(
    repository: Path,
    model: RepositoryModel,
    models: Mapping[str, RepositoryModel],
    problems: Problems,
) -> EngineModel | None:
    config = model.config
    parameters = model.parameters
    settings = engine_settings(config, parameters, problems)
    if (
        not {"input_ids", "request_output_len"} <= config.input_names
        or "output_ids" not in config.output_names
    ):
        problems.error(
            config.file,
            0,
            "input",
            "an engine model needs input_ids, request_output_len and output_ids",
        )
        return None
    given = next(
        ((n, parameters.get(n)) for n in ("gpt_model_path", "engine_dir") if parameters.get(n)),
        None,
    )
    engine = find_engine(
        config, given, model.versions[-1] if model.versions else 1, repository, problems
    )
    before = _neighbour(model.name, Role.PREPROCESSING, models)
    after = _neighbour(model.name, Role.POSTPROCESSING, models)
    if engine is None:
        return None
    _warn_of_echo(config, parameters, problems)
    tokenizer = _tokenizer_named_by([before, after, model], problems)
    batching = config.dynamic_batching
    return EngineModel(
        name=model.name,
        engine=engine,
        tokenizer_folder=find_tokenizer(
            tokenizer.config if tokenizer else None,
            tokenizer.parameters.get("tokenizer_dir") if tokenizer else None,
            engine.path,
            repository,
            problems,
        ),
        settings=_with_beams(settings, engine),
        decoupled=config.decoupled,
        exclude_input_in_output=parameters.get("exclude_input_in_output", False),
        normalize_log_probs=parameters.get("normalize_log_probs", True),
        # Unset meant False in 0.9 and 0.10 and True since 0.11; True gives one BOS, as the model
        # was trained.
        add_special_tokens=before.parameters.get("add_special_tokens", True) if before else True,
        skip_special_tokens=after.parameters.get("skip_special_tokens", True) if after else True,
        queue_policy=batching.queue_policy if batching else QueuePolicy(),
        priority_levels=batching.priority_levels if batching else 0,
        default_priority=batching.default_priority_level if batching else 0,
        adapter_folder=find_adapters(
            config, parameters.get("lora_prefetch_dir"), repository, problems
        ),
    )


def _tokenizer_named_by(
    models: Sequence[RepositoryModel | None], problems: Problems
) -> RepositoryModel | None:
    """The first of these models that names a tokenizer; one that comes after it is not asked, which
    is said.
    """
    naming = [
        model for model in models if model is not None and model.parameters.get("tokenizer_dir")
    ]
    last = models[-1]
    if last is not None and last in naming[1:]:
        first = naming[0]
        given = last.parameters.get("tokenizer_dir")
        if first.parameters.get("tokenizer_dir") != given:
            key = "parameters.tokenizer_dir"
            text = f"'{given}' has no effect: the tokenizer that {first.name} names is used"
            problems.warn(last.config.file, last.config.line(key), key, text)
    return naming[0] if naming else None


def _with_beams(settings: EngineSettings, engine: EngineConfig) -> EngineSettings:
    """Where the repository does not say how wide beams may be, the engine's build does."""
    if settings.max_beam_width is not None:
        return settings
    return replace(settings, max_beam_width=engine.build.max_beam_width)


def _warn_of_echo(config: ModelConfig, parameters: Parameters, problems: Problems) -> None:
    """Upstream's default surprises so many that it is said once, at the start."""
    key = "parameters.exclude_input_in_output"
    # said already, then
    unset = parameters.get("exclude_input_in_output") is None and key not in config.unfilled
    if unset and "sequence_length" in config.output_names:  # before 0.6 there was no choice
        text = "is not set: answers begin with the prompt, as upstream's do; True leaves it out"
        problems.warn(config.file, config.line(key), key, text)


def _neighbour(
    engine: str, role: Role, models: Mapping[str, RepositoryModel]
) -> RepositoryModel | None:
    """The model of `role` that shares an ensemble with the engine, or the one with the customary
    name.
    """
    for model in models.values():
        steps = [step.model_name for step in model.config.ensemble_steps]
        if engine in steps:
            found = [models[name] for name in steps if name in models and models[name].role is role]
            if found:
                return found[0]
    same_role = [model for model in models.values() if model.role is role]
    customary = [model for model in same_role if model.name == role.value]
    return customary[0] if customary else same_role[0] if len(same_role) == 1 else None


def _read_chains(
    models: Mapping[str, RepositoryModel], problems: Problems
) -> Iterator[tuple[str, TextChain]]:
    for model in models.values():
        chain = None
        if model.role is Role.ENSEMBLE:
            chain = _ensemble_chain(model, models)
        elif model.role is Role.BLS:
            chain = _bls_chain(model, models, problems)
        if chain is not None:
            yield model.name, chain


def _ensemble_chain(
    model: RepositoryModel, models: Mapping[str, RepositoryModel]
) -> TextChain | None:
    """The chain an ensemble is, where it is one of the three known models and nothing else."""
    config = model.config
    steps = model.config.ensemble_steps
    roles = {
        step.model_name: models[step.model_name].role for step in steps if step.model_name in models
    }
    engines = [name for name, role in roles.items() if role is Role.ENGINE]
    known = {Role.PREPROCESSING, Role.ENGINE, Role.POSTPROCESSING}
    if len(roles) < len(steps) or len(engines) != 1 or set(roles.values()) != known:
        return None
    after = next(name for name, role in roles.items() if role is Role.POSTPROCESSING)
    before = next(name for name, role in roles.items() if role is Role.PREPROCESSING)
    return TextChain(
        name=model.name,
        engine=engines[0],
        fields=ensemble_fields(config, roles),
        ensemble=True,
        decoupled=any(models[name].config.decoupled for name in roles),
        placeholders=_sends_placeholders(models[after].config),
        comma_words=takes_comma_words(models[before].config),
    )


def _bls_chain(
    model: RepositoryModel, models: Mapping[str, RepositoryModel], problems: Problems
) -> TextChain | None:
    wanted = model.parameters.get("tensorrt_llm_model_name")
    engines = [name for name, other in models.items() if other.role is Role.ENGINE]
    engine = wanted or "tensorrt_llm"
    if wanted is None and engine not in engines and len(engines) == 1:
        engine = engines[0]
    if engine not in engines:
        key = "parameters.tensorrt_llm_model_name"
        text = f"there is no engine model '{engine}' here" + (
            f" (there is {', '.join(engines)})" if engines else ""
        )
        problems.error(model.config.file, model.config.line(key), key, text)
        return None
    draft = model.parameters.get("tensorrt_llm_draft_model_name") or ""
    if draft and draft not in engines:
        key = "parameters.tensorrt_llm_draft_model_name"
        problems.error(
            model.config.file,
            model.config.line(key),
            key,
            f"there is no engine model '{draft}' here",
        )
    after = _neighbour(engine, Role.POSTPROCESSING, models)
    return TextChain(
        name=model.name,
        engine=engine,
        draft_engine=draft,
        fields=bls_fields(model.config),
        ensemble=False,
        decoupled=model.config.decoupled,
        placeholders=after is None or _sends_placeholders(after.config),
        accumulate_tokens=model.parameters.get("accumulate_tokens", False),
    )


def _sends_placeholders(postprocessing: ModelConfig) -> bool:
    return bool({"OUT_CUM_LOG_PROBS", "OUT_CONTEXT_LOGITS"} & postprocessing.output_names)


def _with_batch_size(
    model: RepositoryModel,
    engines: Mapping[str, EngineModel],
    chains: Mapping[str, TextChain],
    problems: Problems,
) -> RepositoryModel:
    """An unfilled max_batch_size is the engine's."""
    if "max_batch_size" not in model.config.unfilled:
        return model
    name = chains[model.name].engine if model.name in chains else model.name
    engine = engines.get(name) or next(iter(engines.values()), None)
    size = engine.engine.build.max_batch_size if engine else 1
    text = f"was not filled: using the engine's ({size})"
    problems.warn(model.config.file, model.config.line("max_batch_size"), "max_batch_size", text)
    document = {**model.config.document, "max_batch_size": size}
    return replace(model, config=replace(model.config, max_batch_size=size, document=document))
