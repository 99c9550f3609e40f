"""The package must not execute data from files or messages, and must not hide failures."""

import ast

import pytest
from source_tree import SourceFile, source, source_files

RUNS_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}  # the builtins
METHODS = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("os", "system"),
}
# modules that execute a file by its path
LOADERS = {"importlib.util", "importlib.machinery", "runpy", "imp"}
BROAD = {"Exception", "BaseException"}
# executes a user's model.py if the user has enabled it
PYTHON_MODELS = "slipstream/server/python_models/"


def problems(file: SourceFile) -> list[str]:
    return [
        f"{file.name}:{line}: {what}"
        for line, what in sorted([*_imports(file), *_calls(file), *_silent(file)])
    ]


def _imports(file: SourceFile):
    for line, module in file.imports():
        if module.partition(".")[0] in RUNS_DATA:
            yield line, f"imports {module}"
        if module in LOADERS and not file.name.startswith(PYTHON_MODELS):
            yield line, f"imports {module}"
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module, alias.name) in METHODS:
                    yield node.lineno, f"imports {node.module}.{alias.name}"


def _calls(file: SourceFile):
    for node in file.nodes:
        match node:
            case ast.Name(id=name) if name in CALLS and not file.name.startswith(PYTHON_MODELS):
                yield node.lineno, f"uses {name}"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in METHODS:
                yield node.lineno, f"uses {module}.{name}"
            case ast.keyword(value=ast.Constant(value=False)):
                continue
            case ast.keyword(arg=("shell" | "trust_remote_code" | "allow_pickle") as name):
                yield node.lineno, f"passes {name}"


def _silent(file: SourceFile):
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "catches every exception, also SystemExit and KeyboardInterrupt"
            if all(_is_empty(statement) for statement in node.body) and _is_broad(node.type):
                yield node.lineno, "swallows every failure"


def _is_empty(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _is_broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name is None or (isinstance(name, ast.Name) and name.id in BROAD) for name in names)


def test_the_package_executes_no_data_and_hides_no_failure():
    assert [found for file in source_files() for found in problems(file)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "def late():\n    import marshal",
        "import shelve, json",
        "import dill.source",
        "eval('1')",
        "handler = exec",
        "import torch\ntorch.load('weights.bin')",
        "from torch import load",
        "import yaml\nyaml.load(text)",
        "import subprocess\nsubprocess.run(line, shell=True)",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "import importlib.util",
        "from importlib.util import spec_from_file_location",
        "import runpy",
        "try:\n    work()\nexcept:\n    report()",
        "try:\n    work()\nexcept Exception:\n    pass",
        "try:\n    work()\nexcept (OSError, Exception):\n    ...",
    ],
)
def test_forbidden_code_is_found(text):
    assert problems(source(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "import json, importlib\nimportlib.import_module('slipstream.cli.start')",
        "import re\nre.compile('x')",
        "model.eval()",
        "import numpy\nnumpy.load(path, allow_pickle=False)",
        "try:\n    work()\nexcept FileNotFoundError:\n    pass  # it was gone already",
        "try:\n    work()\nexcept Exception as error:\n    report(error)",
    ],
)
def test_harmless_code_is_accepted(text):
    assert problems(source(text)) == []


def test_only_python_models_may_load_a_file_by_its_path():
    text = "import importlib.util"
    assert problems(source(text, PYTHON_MODELS + "loader.py")) == []
    assert problems(source(text, "slipstream/server/http/routes.py")) != []
    assert problems(source("import pickle", PYTHON_MODELS + "loader.py")) != []
