"""Read the models of a repository and the pipelines (preprocessing, engine, postprocessing) in it.

`read_repository(path)` reads all models. It returns a `Repository` with warnings, or raises one
RepositoryError that lists every problem. It reads no weights and executes no code: a `model.py` in
the repository is not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.engine.sampling_params import EMBEDDING_KINDS
from slipstream.engine.settings import EngineSettings
from slipstream.repository.config import (
    CONFIG_NAME,
    DynamicBatching,
    ModelConfig,
    QueuePolicy,
    read_model_config,
)
from slipstream.repository.engine_parameters import (
    Parameters,
    engine_settings,
    read_parameters,
    report_unfilled,
)
from slipstream.repository.ensembles import check_graph
from slipstream.repository.folders import (
    find_adapters,
    find_engine,
    find_tokenizer,
    find_versions,
    model_folders,
)
from slipstream.repository.own_code import is_users_model, report_code, report_unknown_models
from slipstream.repository.problems import Problem, Problems, RepositoryError
from slipstream.repository.roles import (
    Role,
    TextFields,
    bls_fields,
    ensemble_fields,
    find_role,
    takes_comma_words,
)
from slipstream.weights.engine_config import EngineConfig

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class RepositoryModel:
    name: str
    folder: Path
    config: ModelConfig
    role: Role
    versions: tuple[int, ...]  # served versions, in ascending order
    parameters: Parameters = field(repr=False, default=Parameters({}))
    malformed: bool = False  # whether the configuration has errors and the model cannot be built


@dataclass(frozen=True)
class EngineModel:
    """An engine model with its folders and settings."""

    name: str
    engine_config: EngineConfig
    tokenizer_folder: Path
    settings: EngineSettings
    decoupled: bool
    exclude_input_in_output: bool
    normalize_log_probs: bool
    add_special_tokens: bool
    skip_special_tokens: bool
    queue_policy: QueuePolicy = field(default_factory=QueuePolicy)
    priority_levels: int = 0  # number of priority levels; 0 for no limit
    default_priority: int = 0
    adapter_folder: Path | None = None  # parent of the adapter folders that requests may name
    embedding_pooling: str = ""  # kind of pooling, whatever the model declares; empty: its own


@dataclass(frozen=True)
class TextPipeline:
    """A text-to-text model: preprocessing, an engine and postprocessing.

    In the repository it is an ensemble of the three or one BLS model.
    """

    name: str
    engine: str  # name of the engine model
    fields: TextFields
    ensemble: bool
    decoupled: bool
    placeholders: bool  # whether outputs not requested are sent as 0.0, as before release 0.14
    accumulate_tokens: bool = False
    draft_engine: str = ""  # engine model that drafts for requests with num_draft_tokens
    comma_words: bool = False  # whether a string of a word list holds words separated by commas


@dataclass(frozen=True)
class Repository:
    paths: tuple[Path, ...]
    models: Mapping[str, RepositoryModel]
    engines: Mapping[str, EngineModel]
    pipelines: Mapping[str, TextPipeline]  # name of the ensemble or BLS model → pipeline
    graphs: frozenset[str] = frozenset()  # names of the other ensembles, which run step by step
    warnings: tuple[Problem, ...] = ()

    def needed_by(self, name: str) -> tuple[str, ...]:
        """Return the models that a model needs, itself included, in an order to load them in."""
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
        if name in self.pipelines:
            yield self.pipelines[name].engine
            if self.pipelines[name].draft_engine:
                yield self.pipelines[name].draft_engine
        for step in self.models[name].config.ensemble_steps:
            if step.model_name != name:
                yield step.model_name


Paths = str | Path | Sequence[str | Path]
ServedElsewhere = Collection[str] | Callable[[RepositoryModel], bool]


def read_repository(path: Paths, served_elsewhere: ServedElsewhere = ()) -> Repository:
    """Return the repository, or raise RepositoryError with every problem.

    `served_elsewhere` names the models that the caller serves itself. Their configurations are not
    checked.
    """
    repository, problems = inspect_repository(path, served_elsewhere)
    if problems.errors:
        raise RepositoryError(problems.errors)
    return repository


def inspect_repository(
    path: Paths,
    served_elsewhere: ServedElsewhere = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    sent: Mapping[str, Path] | None = None,
) -> tuple[Repository, Problems]:
    """Return what could be read of the repository, and its problems.

    `overrides` are configurations in JSON's form. They replace the files of the models they name.
    `sent` are folders of models by name that replace those of the repository.
    """
    folders = _folders(path)
    problems = Problems()
    models = _read_folders(folders, overrides or {}, sent or {}, problems)
    ours = {
        name: model
        for name, model in models.items()
        if not _is_served_elsewhere(model, served_elsewhere)
    }
    engines = dict(_read_engines(ours, models, problems))
    pipelines = dict(_read_pipelines(ours, problems))
    graphs = frozenset(
        name
        for name, model in ours.items()
        if model.role is Role.ENSEMBLE and name not in pipelines
    )
    configs = {name: model.config for name, model in models.items()}
    for name in sorted(graphs):
        check_graph(configs[name], configs, problems)
    report_unknown_models(ours.values(), problems)
    places = ", ".join(str(folder) for folder in folders)
    report_unfilled(places, ((model.config, model.role) for model in ours.values()), problems)
    models = {
        name: _fill_batch_size(model, engines, pipelines, problems)
        for name, model in models.items()
    }
    return Repository(folders, models, engines, pipelines, graphs, problems.warnings), problems


def _folders(path: Paths) -> tuple[Path, ...]:
    return (Path(path),) if isinstance(path, (str, Path)) else tuple(Path(one) for one in path)


def _is_served_elsewhere(model: RepositoryModel, served_elsewhere: ServedElsewhere) -> bool:
    if callable(served_elsewhere):
        return served_elsewhere(model)
    return model.name in served_elsewhere


def _read_folders(
    folders: tuple[Path, ...],
    overrides: Mapping[str, Mapping[str, Any]],
    sent: Mapping[str, Path],
    problems: Problems,
) -> dict[str, RepositoryModel]:
    """Return the models of all folders by name, and report names that occur twice."""
    models: dict[str, RepositoryModel] = {}
    found = list(sent.values())
    for folder in folders:
        found += [one for one in model_folders(folder, problems) if one.name not in sent]
    for folder in found:
        model = _read_model(folder, overrides.get(folder.name), problems)
        if model is None:
            continue
        if model.name in models:
            text = f"there is a model '{model.name}' in {models[model.name].folder.parent} too"
            problems.error(model.folder, 0, "", text)
        models.setdefault(model.name, model)
    if not models and not problems.errors:
        places = ", ".join(str(folder) for folder in folders)
        problems.error(places, 0, "", f"no model in it (a model is a folder with {CONFIG_NAME})")
    return models


def _read_model(
    folder: Path, override: Mapping[str, Any] | None, problems: Problems
) -> RepositoryModel | None:
    known = problems.count(fatal=True)
    config = read_model_config(folder, problems, override)
    if config is None:
        return None
    if not _NAME.fullmatch(folder.name):
        problems.error(folder, 0, "", "a model's name may hold letters, digits, '.', '_' and '-'")
    malformed = problems.count(fatal=True) > known
    role = find_role(config)
    parameters = read_parameters(config, role, problems)
    versions = find_versions(folder, config, role, problems)
    return RepositoryModel(folder.name, folder, config, role, versions, parameters, malformed)


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
    """Return the engine model, or None after reporting why it cannot be used."""
    config = model.config
    parameters = model.parameters
    settings = engine_settings(config, parameters, problems)
    inputs = {"input_ids", "request_output_len"}
    if not inputs <= config.input_names or "output_ids" not in config.output_names:
        text = "an engine model needs input_ids, request_output_len and output_ids"
        problems.error(config.file, 0, "input", text)
        return None
    engine = _find_engine(repository, model, problems)
    if engine is None:
        return None
    _warn_if_prompt_is_repeated(config, parameters, problems)
    before = _find_neighbour(model.name, Role.PREPROCESSING, models)
    after = _find_neighbour(model.name, Role.POSTPROCESSING, models)
    tokenizer = _find_tokenizer_model([before, after, model], problems)
    batching = config.dynamic_batching or DynamicBatching()
    return EngineModel(
        name=model.name,
        engine_config=engine,
        tokenizer_folder=find_tokenizer(
            tokenizer.config if tokenizer else None,
            _parameter(tokenizer, "tokenizer_dir", None),
            engine.path,
            repository,
            problems,
        ),
        settings=_apply_build_limits(settings, engine, config, problems),
        decoupled=config.decoupled,
        exclude_input_in_output=parameters.get("exclude_input_in_output", False),
        normalize_log_probs=parameters.get("normalize_log_probs", True),
        # Unset meant False in 0.9 and 0.10 and means True since 0.11. True adds one BOS token, as
        # in the model's training.
        add_special_tokens=_parameter(before, "add_special_tokens", True),
        skip_special_tokens=_parameter(after, "skip_special_tokens", True),
        queue_policy=batching.queue_policy,
        priority_levels=batching.priority_levels,
        default_priority=batching.default_priority_level,
        adapter_folder=find_adapters(
            config, parameters.get("lora_prefetch_dir"), repository, problems
        ),
        embedding_pooling=_embedding_pooling(config, parameters, problems),
    )


def _embedding_pooling(config: ModelConfig, parameters: Parameters, problems: Problems) -> str:
    kind: str = parameters.get("embedding_pooling", "")
    if kind and kind not in EMBEDDING_KINDS:
        text = f"must be one of {', '.join(EMBEDDING_KINDS)}, got '{kind}'"
        problems.error(config.file, 0, "parameters.embedding_pooling", text)
    return kind


def _parameter(model: RepositoryModel | None, name: str, default: Any) -> Any:
    """Return a parameter of a model that may be absent."""
    return default if model is None else model.parameters.get(name, default)


def _find_engine(
    repository: Path, model: RepositoryModel, problems: Problems
) -> EngineConfig | None:
    given = None
    for name in ("gpt_model_path", "engine_dir"):
        if given is None and model.parameters.get(name):
            given = (name, model.parameters.get(name))
    version = model.versions[-1] if model.versions else 1
    return find_engine(model.config, given, version, repository, problems)


def _find_tokenizer_model(
    models: Sequence[RepositoryModel | None], problems: Problems
) -> RepositoryModel | None:
    """Return the first of these models that names a tokenizer.

    Warns if the last model, which is the engine, names another tokenizer.
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
            text = f"'{given}' has no effect: the tokenizer of {first.name} is used"
            problems.warn(last.config.file, last.config.line(key), key, text)
    return naming[0] if naming else None


def _apply_build_limits(
    settings: EngineSettings, engine: EngineConfig, config: ModelConfig, problems: Problems
) -> EngineSettings:
    """Return the settings within the limits of the build.

    The build's max_batch_size bounds max_num_sequences. Its beam width applies if the repository
    sets none.
    """
    beams = settings.max_beam_width or engine.build.max_beam_width
    rows = settings.max_rows
    most = engine.build.chosen("max_batch_size")
    if rows is not None and most is not None and rows > most:
        key = "parameters.max_num_sequences"
        text = (
            f"{rows} is lowered to {most}, the engine's max_batch_size; build the engine with a "
            "larger --max_batch_size, or start with --max-batch-size"
        )
        problems.warn(config.file, config.line(key), key, text)
        rows = most
    return replace(settings, max_rows=rows, max_beam_width=beams)


def _warn_if_prompt_is_repeated(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> None:
    """Warn that responses begin with the prompt, a default of TensorRT-LLM that surprises users."""
    key = "parameters.exclude_input_in_output"
    # an unfilled template variable has already been reported
    unset = parameters.get("exclude_input_in_output") is None and key not in config.unfilled
    # repositories before 0.6, without sequence_length, have no such parameter
    if unset and "sequence_length" in config.output_names:
        text = "is not set: answers begin with the prompt, as upstream's do; True leaves it out"
        problems.warn(config.file, config.line(key), key, text)


def _find_neighbour(
    engine: str, role: Role, models: Mapping[str, RepositoryModel]
) -> RepositoryModel | None:
    """Return the model of `role` that belongs to an engine, or None.

    That is the one in the same ensemble, else the one with the usual name, else the only one.
    """
    for model in models.values():
        steps = [step.model_name for step in model.config.ensemble_steps]
        if engine in steps:
            for name in steps:
                if name in models and models[name].role is role:
                    return models[name]
    same_role = {model.name: model for model in models.values() if model.role is role}
    if role.value in same_role:
        return same_role[role.value]
    return next(iter(same_role.values())) if len(same_role) == 1 else None


def _read_pipelines(
    models: Mapping[str, RepositoryModel], problems: Problems
) -> Iterator[tuple[str, TextPipeline]]:
    for model in models.values():
        pipeline = None
        if model.role is Role.ENSEMBLE:
            pipeline = _read_ensemble(model, models)
        elif model.role is Role.BLS:
            pipeline = _read_bls(model, models, problems)
        if pipeline is not None:
            yield model.name, pipeline


def _read_ensemble(
    model: RepositoryModel, models: Mapping[str, RepositoryModel]
) -> TextPipeline | None:
    """Return the pipeline of an ensemble, or None unless it consists of the three known roles."""
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
    return TextPipeline(
        name=model.name,
        engine=engines[0],
        fields=ensemble_fields(config, roles),
        ensemble=True,
        decoupled=any(models[name].config.decoupled for name in roles),
        placeholders=_sends_placeholders(models[after].config),
        comma_words=takes_comma_words(models[before].config),
    )


def _read_bls(
    model: RepositoryModel, models: Mapping[str, RepositoryModel], problems: Problems
) -> TextPipeline | None:
    """Return the pipeline of a BLS model, or None after reporting that its engine is missing."""
    config = model.config
    wanted = model.parameters.get("tensorrt_llm_model_name")
    engines = [name for name, other in models.items() if other.role is Role.ENGINE]
    engine = wanted or "tensorrt_llm"
    if wanted is None and engine not in engines and len(engines) == 1:
        engine = engines[0]
    if engine not in engines and is_users_model(model):
        report_code(model, problems)
        return None
    if engine not in engines:
        key = "parameters.tensorrt_llm_model_name"
        others = f" (there is {', '.join(engines)})" if engines else ""
        text = f"there is no engine model '{engine}' here{others}"
        problems.error(config.file, config.line(key), key, text)
        return None
    draft = model.parameters.get("tensorrt_llm_draft_model_name") or ""
    if draft and draft not in engines:
        key = "parameters.tensorrt_llm_draft_model_name"
        text = f"there is no engine model '{draft}' here"
        problems.error(config.file, config.line(key), key, text)
    after = _find_neighbour(engine, Role.POSTPROCESSING, models)
    return TextPipeline(
        name=model.name,
        engine=engine,
        draft_engine=draft,
        fields=bls_fields(config),
        ensemble=False,
        decoupled=config.decoupled,
        placeholders=after is None or _sends_placeholders(after.config),
        accumulate_tokens=model.parameters.get("accumulate_tokens", False),
    )


def _sends_placeholders(postprocessing: ModelConfig) -> bool:
    return bool({"OUT_CUM_LOG_PROBS", "OUT_CONTEXT_LOGITS"} & postprocessing.output_names)


def _fill_batch_size(
    model: RepositoryModel,
    engines: Mapping[str, EngineModel],
    pipelines: Mapping[str, TextPipeline],
    problems: Problems,
) -> RepositoryModel:
    """Return the model, with the engine's batch size if its max_batch_size was not filled."""
    if "max_batch_size" not in model.config.unfilled:
        return model
    name = pipelines[model.name].engine if model.name in pipelines else model.name
    engine = engines.get(name) or next(iter(engines.values()), None)
    size = engine.engine_config.build.max_batch_size if engine else 1
    text = f"was not filled: using the engine's ({size})"
    problems.warn(model.config.file, model.config.line("max_batch_size"), "max_batch_size", text)
    document = {**model.config.document, "max_batch_size": size}
    return replace(model, config=replace(model.config, max_batch_size=size, document=document))
