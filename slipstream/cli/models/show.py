"""`slipstream show MODEL`: print what a model is, where it comes from and what uses it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slipstream.cli.arguments import Parser, add_verbose
from slipstream.cli.models.inventory import FoundModel, add_model_name, find_one, given_name
from slipstream.cli.models.repository_option import add_repository, repository_folder
from slipstream.repository.collection import users_of
from slipstream.weights.cache.engines import CachedEngine


def create_parser() -> Parser:
    parser = Parser("slipstream show", "Print what a model is, and where its files are.")
    add_model_name(parser, "Name of the model, as `slipstream list` prints it.")
    add_repository(parser)
    add_verbose(parser)
    return parser


def run(given: Namespace) -> int:
    found = find_one(repository_folder(given.repo), given_name(given))
    rows = list(_rows(found))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name + ':':<{width}}{value}")
    return 0


def _rows(found: FoundModel) -> Iterator[tuple[str, str]]:
    yield "name", found.name
    yield "family", found.family
    yield "source", found.source
    yield "type", found.type
    yield "size", found.size
    yield "age", found.age
    yield "served", "yes" if found.served else "no"
    if found.model is not None:
        yield "models", ", ".join(found.model.parts)
        yield "repository", str(found.model.folder.parent)
    if found.engine is not None:
        yield from _engine_rows(found.engine)


def _engine_rows(engine: CachedEngine) -> Iterator[tuple[str, str]]:
    spec = engine.config.spec
    build = engine.config.build
    yield "engine", str(engine.path)
    yield "architecture", spec.architecture
    yield "layers", f"{spec.layers}, {spec.hidden_size} wide"
    yield "vocabulary", f"{spec.vocab_size} tokens"
    yield "longest sequence", f"{build.max_seq_len} tokens"
    users = dict.fromkeys(str(file.parent.parent) for file in users_of(engine.path))
    yield "used by", ", ".join(users) or "no repository"
