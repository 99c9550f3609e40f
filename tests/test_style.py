"""Rules of form and language that a reviewer would otherwise have to remember."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from source_tree import ROOT, SourceFile, source, source_files

MAX_FUNCTION_LINES = 50

# The modules that may use private names of one third-party package. The package's version is bounded
# in pyproject.toml, and tests fail when one of the names is gone.
PRIVATE_NAME_ADAPTERS = {
    "slipstream/server/grpc/core_transport.py": "grpc",
    "slipstream/kernels/torch_private.py": "torch",
}

FILES = source_files()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# Private names of third-party packages


def third_party(module: str) -> bool:
    root = module.partition(".")[0]
    return root != "slipstream" and root not in sys.stdlib_module_names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_modules(file: SourceFile) -> dict[str, str]:
    """Return the third-party modules that names in the file stand for: {"np": "numpy"}."""
    found = {}
    for node in file.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if third_party(alias.name):
                    found[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and third_party(node.module):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.expr) -> str:
    """Return "a.b.c" for that expression, or nothing for any other kind."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = dotted(node.value)
        return f"{parent}.{node.attr}" if parent else ""
    return ""


def private_names(file: SourceFile) -> Iterator[tuple[int, str]]:
    modules = imported_modules(file)
    for node in file.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            names = [f"{modules[root]}.{rest}"] if root in modules else []
        else:
            continue
        for name in names:
            if third_party(name) and any(is_private(part) for part in name.split(".")):
                yield node.lineno, name


def private_name_problems(file: SourceFile) -> list[str]:
    allowed = PRIVATE_NAME_ADAPTERS.get(file.name)
    return sorted(
        f"{file.name}:{line} uses {name}"
        for line, name in set(private_names(file))
        if name.partition(".")[0] != allowed
    )


def test_no_private_names_of_third_party_packages():
    assert [problem for file in FILES for problem in private_name_problems(file)] == []


@pytest.mark.parametrize(
    "text",
    [
        "from grpc._cython import cygrpc",
        "import grpc._cython.cygrpc as cygrpc",
        "from uvicorn.protocols import _impl",
        "import torch\ntorch._C._nothing()",
        "from torch import nn\nnn._reduction.get_enum('mean')",
    ],
)
def test_a_private_name_is_found(text):
    assert private_name_problems(source(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "import argparse\nargparse._SubParsersAction",  # the standard library
        "from slipstream.engine.plan import _one",
        "import torch\ntorch.nn.functional.silu\ntorch.__version__",
        "class A:\n    def f(self):\n        self._x = 1",
    ],
)
def test_a_public_name_is_not_found(text):
    assert private_name_problems(source(text)) == []


# Form


def is_gpu_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def long_functions(file: SourceFile) -> list[str]:
    found = []
    for node in file.nodes:
        if isinstance(node, FUNCTIONS) and not is_gpu_kernel(node):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{file.name}:{node.lineno} {node.name} has {lines} lines")
    return found


def nested_ternaries(file: SourceFile) -> list[str]:
    return sorted(
        f"{file.name}:{node.lineno} has a nested ternary"
        for node in file.nodes
        if isinstance(node, ast.IfExp)
        and any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))
    )


def nested_comprehensions(file: SourceFile) -> list[str]:
    found = set()
    for node in file.nodes:
        if isinstance(node, COMPREHENSIONS):
            inner = [part for part in ast.walk(node) if part is not node]
            if any(isinstance(part, COMPREHENSIONS) for part in inner):
                found.add(f"{file.name}:{node.lineno} has a nested comprehension")
    return sorted(found)


def tuple_assignments(file: SourceFile) -> list[str]:
    """Return the assignments like `a, b = f(), 2`. A swap, `a, b = b, a`, is none of them."""
    found = []
    for node in file.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and not is_swap(target, node.value):
            found.append(f"{file.name}:{node.lineno} assigns several names in one statement")
    return found


def is_swap(target: ast.Tuple, value: ast.Tuple) -> bool:
    left = {ast.unparse(part) for part in target.elts}
    return left == {ast.unparse(part) for part in value.elts}


def test_functions_fit_on_a_screen():
    assert [problem for file in FILES for problem in long_functions(file)] == []


def test_no_nested_ternaries():
    assert [problem for file in FILES for problem in nested_ternaries(file)] == []


def test_no_nested_comprehensions():
    assert [problem for file in FILES for problem in nested_comprehensions(file)] == []


def test_one_assignment_per_statement():
    assert [problem for file in FILES for problem in tuple_assignments(file)] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (nested_ternaries, "x = 1 if a else 2 if b else 3"),
        (nested_comprehensions, "x = [[y for y in row] for row in rows]"),
        (tuple_assignments, "a, b = 1, 2"),
        (tuple_assignments, "self.a, self.b = a, b"),
    ],
)
def test_bad_form_is_found(rule, text):
    assert len(rule(source(text))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_functions, "@triton.jit\ndef f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (nested_ternaries, "x = f(1 if a else 2) if b else 3"),
        (nested_comprehensions, "x = [y for row in rows for y in row]"),
        (tuple_assignments, "a, b = b, a\nc, d = f()"),
    ],
)
def test_good_form_is_not_found(rule, text):
    assert rule(source(text)) == []


# Language

# A docstring that begins like a question does not say what a function returns or does.
QUESTIONS = ("What ", "How ", "Where ", "Why ", "When ", "Which ", "Who ", "Whether ", "Let ")
# These have docstrings of the older form.
OLDER_DOCSTRINGS = (
    "slipstream/cli/",
    "slipstream/client/",
    "slipstream/engine/cpu/",
    "slipstream/engine/memory/",
    "slipstream/kernels/cpu/code/",
    "slipstream/ray/",
    "slipstream/server/engine_link/cluster/",
    "slipstream/server/engine_link/silence.py",
    "slipstream/weights/",
)


def question_docstrings(file: SourceFile) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = file.nodes
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return [f"{file.name}: {text.splitlines()[0]}" for text in texts if text.startswith(QUESTIONS)]


def test_docstrings_say_what_is_returned_or_done():
    files = [file for file in FILES if not file.name.startswith(OLDER_DOCSTRINGS)]
    assert [problem for file in files for problem in question_docstrings(file)] == []


def test_a_docstring_that_begins_like_a_question_is_found():
    text = 'def ready(self):\n    """Whether it serves."""'
    assert len(question_docstrings(source(text))) == 1
    assert question_docstrings(source(text.replace("Whether", "Return whether"))) == []


# Words of a private vocabulary, and what to write instead. Matched as whole words in any case.
WORDS = {
    r"nobody('s)?": "no one, or name the subject",
    r"whoever": "name the subject",
    r"anybody('s)?": "anyone, or name the subject",
    r"anew": "again",
    r"heed(s|ed|ing)?": "use, obey, respect",
    r"(is|are|was|were|be|been) told": "is sent, is reported",
    r"so many": "the number of",
    r"of which": "split the sentence",
    r"(let|lets|letting) go of": "release, free",
    r"(give|gives|giving|gave) way": "yield, is preempted",
    r"for want of": "without",
    r"dear(er|est)?(?! sir)": "high retention priority",
    r"the books": "the state, invariants",
    r"soften(s|ed|ing)?": "online-softmax update",
    r"key heads?": "KV head",
    r"twelve bits?": "12-bit",
    r"(few|many|one)[_ ]tokens?'": "skinny GEMM, GEMM, GEMV",
    r"guess(es|ed|ing)?": "draft tokens",
    r"by so much": "by this amount",
    r"hands full": "busy",
    r"loses? patience": "times out",
    r"does not speak our language": "unknown message",
    r"comes? along": "is included",
    r"behind (it|them) which": "name the order",
}
# These are still in the files of OLDER_WORDING.
RECENT_WORDS = {
    r"leavers?": "clients that disconnect",
    r"foreign": "of another site, user or format",
    r"weakness(es)?": "vulnerability",
    r"lent|lends?|lender": "shared",
    r"twins?": "reference, counterpart",
}
OLDER_WORDING = (
    "docs/reliability.md",
    "slipstream/weights/checkpoint.py",
    "slipstream/weights/engine_config.py",
    "tests/gates/",
)


def word_pattern(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(r"\b(" + "|".join(words) + r")\b", re.IGNORECASE)


PATTERN = word_pattern([*WORDS, *RECENT_WORDS])
OLDER_PATTERN = word_pattern(WORDS)
# Texts of others, and this list itself.
QUOTED = ("tests/conformance/", "tests/seeds/", "tests/test_style.py", "CHANGELOG.md")
TEXTS = {".py", ".md", ".html", ".proto", ".toml", ".yml", ".yaml", ".sub", ".conf"}


def text_files() -> list[Path]:
    folders = [ROOT / name for name in ("slipstream", "tests", "benchmarks", "docs", "deploy")]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in TEXTS]
    return sorted([*found, *ROOT.glob("*.md")])


def private_words(text: str, name: str) -> list[str]:
    pattern = OLDER_PATTERN if name.startswith(OLDER_WORDING) else PATTERN
    return [
        f"{name}:{number}: {found[0]!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for found in pattern.finditer(line.replace("_", " "))
    ]


def test_no_words_of_a_private_vocabulary():
    problems = []
    for path in text_files():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(QUOTED):
            problems += private_words(path.read_text("utf-8"), name)
    assert problems == []


@pytest.mark.parametrize(
    "text",
    [
        "page 0 is nobody's",
        "def test_it_is_told():",
        "compiled anew",
        "the key heads",
        "the lent server",
        "its twin in torch",
    ],
)
def test_a_private_word_is_found(text):
    assert len(private_words(text, "example")) == 1


def test_ordinary_words_are_not_found():
    text = "The KV heads are stored. It told us. Names of nodes; a bookshelf; newsletter."
    assert private_words(text, "example") == []
