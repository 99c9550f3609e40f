"""Python models with their own code, which only a server with --allow-python-models runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.repository.engine_parameters import PARAMETERS
from slipstream.repository.problems import Problems
from slipstream.repository.roles import Role

if TYPE_CHECKING:
    from slipstream.repository.models import RepositoryModel


def code_file(model: RepositoryModel, version: int) -> Path:
    name = model.config.document.get("default_model_filename") or "model.py"
    return model.folder / str(version) / name


def has_own_code(model: RepositoryModel) -> bool:
    return any(code_file(model, version).is_file() for version in model.versions)


def is_users_model(model: RepositoryModel) -> bool:
    """Return whether a model with the tensors of a BLS model is a Python model of the user.

    Upstream's BLS models have a `model.py` too, but also parameters of their own.
    """
    return has_own_code(model) and not PARAMETERS[Role.BLS].keys() & model.config.parameters.keys()


def report_code(model: RepositoryModel, problems: Problems) -> None:
    """Report that a model needs its own code."""
    text = (
        f"'{model.name}' is a Python model, and code from a repository is not executed; "
        "give --allow-python-models to run it"
    )
    problems.error(model.config.file, 0, "backend", text)


def report_unknown_models(models: Iterable[RepositoryModel], problems: Problems) -> None:
    """Report the models that this server cannot serve."""
    for model in models:
        if model.role is not Role.OTHER or model.malformed:
            continue
        backend = model.config.backend or model.config.platform
        if backend == "python" and has_own_code(model):
            report_code(model, problems)
            continue
        text = (
            f"unable to find backend library for backend '{backend}', "
            "try specifying runtime on the model configuration."
        )
        if backend == "python":
            file = code_file(model, model.versions[-1] if model.versions else 1)
            text = f"'{model.name}' is a Python model without code: there is no {file}"
        problems.error(model.config.file, 0, "", text)
