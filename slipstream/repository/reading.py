"""The result of reading a repository: its models and their problems."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.repository.models import Repository, RepositoryModel
from slipstream.repository.problems import Problem, Problems


class Reading(NamedTuple):
    repository: Repository
    problems: Problems

    def list_errors(self, model: RepositoryModel) -> list[Problem]:
        """Return the errors in a model's folder."""
        folder = str(model.folder)
        return [
            p for p in self.problems.errors if p.file == folder or p.file.startswith(folder + "/")
        ]

    def list_startable_engines(self, names: list[str]) -> list[str]:
        """Return the engine models that these models need and that have no errors."""
        needed = {part for name in names for part in self.repository.needed_by(name)}
        models = self.repository.models
        return [
            name
            for name in self.repository.engines
            if name in needed and not self.list_errors(models[name])
        ]
