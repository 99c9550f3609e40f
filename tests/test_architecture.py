"""Rules of the architecture: the order of imports, and the sizes of files and folders."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import packages_distributions

import pytest
from source_tree import PACKAGE, ROOT, SourceFile, source, source_files

# A folder may import from those in later rows only. Folders of one row do not import each other.
ORDER = (
    ("ray",),
    ("cli",),
    ("bench", "llm"),
    ("offline",),
    ("client",),  # uses the server's protocol
    ("engine_worker",),  # runs the engine's end of the server's link
    ("server",),
    ("repository",),
    ("request_fields",),  # read by repository and server
    ("weights",),
    ("engine",),
    ("model",),
    ("kernels",),
    ("progress", "version"),
)
RANK = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders}

# The same rule inside server/. Modules at its top level may import every folder.
SERVER_ORDER = (
    "frontends",
    "anthropic",
    "openai",
    "grpc",
    "http",
    "python_models",
    "models",
    "fields",
    "text",
    "metrics",
    "tracing",
    "kserve",
    "engine_link",
    "log",
)
SERVER_RANK = {folder: rank for rank, folder in enumerate(SERVER_ORDER)}

BASIC_PACKAGES = {"torch", "numpy", "safetensors", "triton"}  # all that the engine may need
MAX_LINES = 500
MAX_MODULES = 25  # in one folder
MAX_SERVER_TOP = 8
GENERATED = {"slipstream/server/grpc/protocol/descriptor.py"}

FILES = source_files()


def folder_of(file: SourceFile) -> str:
    parts = file.path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def upward_imports(file: SourceFile) -> list[str]:
    folder = folder_of(file)
    found = []
    for line, module in file.imports():
        parts = module.split(".")
        if (
            parts[0] != "slipstream"
            or len(parts) == 1
            or parts[1] == folder
            or parts[1].startswith("__")
        ):
            continue
        if RANK.get(parts[1], -1) <= RANK[folder]:
            found.append(f"{file.name}:{line} imports {module}")
    return found


def server_folder_of(parts: list[str] | tuple[str, ...]) -> str | None:
    """Return the sub-folder of server/ in ["slipstream", "server", folder, ...], if there is one."""
    if list(parts[:2]) != ["slipstream", "server"] or len(parts) < 3:
        return None
    return parts[2] if parts[2] in SERVER_RANK else None


def upward_imports_in_server(file: SourceFile) -> list[str]:
    own = server_folder_of(file.path.relative_to(ROOT).parts)
    if own is None:
        return []
    found = []
    for line, module in file.imports():
        parts = module.split(".")
        if parts[:2] != ["slipstream", "server"] or len(parts) < 3 or parts[2] == own:
            continue
        if SERVER_RANK.get(parts[2], -1) <= SERVER_RANK[own]:
            found.append(f"{file.name}:{line} imports {module}")
    return found


def test_every_folder_is_in_the_import_order():
    folders = {folder_of(file) for file in FILES} - {"__init__"}
    assert folders <= set(RANK), "add new folders to ORDER"


def test_folders_import_only_from_those_below_them():
    files = [file for file in FILES if folder_of(file) != "__init__"]
    assert [found for file in files for found in upward_imports(file)] == []


def test_server_folders_import_only_from_those_below_them():
    assert [found for file in FILES for found in upward_imports_in_server(file)] == []


def test_every_server_folder_is_in_the_import_order():
    folders = {path.name for path in (PACKAGE / "server").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(SERVER_RANK)


def test_folders_have_at_most_25_modules():
    sizes = Counter(file.path.parent for file in FILES if file.path.name != "__init__.py")
    large = {
        folder.relative_to(ROOT).as_posix(): count
        for folder, count in sizes.items()
        if count > MAX_MODULES
    }
    assert large == {}
    assert len(list((PACKAGE / "server").glob("*.py"))) <= MAX_SERVER_TOP


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from slipstream.server.models.batches import BatchedModel", 1),
        ("from slipstream.server import lifecycle", 1),
        ("from slipstream.server.log import output", 0),
        ("from slipstream.server.text.stream import TextStream", 0),
    ],
)
def test_an_upward_import_inside_server_is_found(text, found):
    file = source(text, "slipstream/server/text/example.py")
    assert len(upward_imports_in_server(file)) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slipstream/engine/example.py", "from slipstream.weights.load import start_engine"),
        ("slipstream/engine/example.py", "def late():\n    import slipstream.server.http.routes"),
        ("slipstream/kernels/example.py", "from ..model import spec"),
        ("slipstream/weights/example.py", "from slipstream import server"),
        ("slipstream/server/example.py", "from slipstream.client import command"),
        ("slipstream/server/example.py", "import slipstream.llm"),
    ],
)
def test_an_upward_import_is_found(name, text):
    assert len(upward_imports(source(text, name))) == 1


def test_imports_within_a_folder_and_downward_are_not_found():
    text = "import slipstream\nfrom . import limits\nfrom slipstream.engine.plan import StepPlan\nimport torch"
    assert upward_imports(source(text, "slipstream/server/example.py")) == []


def third_party_imports(file: SourceFile) -> set[str]:
    roots = {module.partition(".")[0] for _, module in file.imports()}
    return roots - sys.stdlib_module_names - {"slipstream"}


@pytest.mark.parametrize("folder", ["engine", "model", "kernels"])
def test_the_engine_needs_only_the_basic_packages(folder):
    files = [file for file in FILES if folder_of(file) == folder]
    assert files
    extras = {
        file.name: extra for file in files if (extra := third_party_imports(file) - BASIC_PACKAGES)
    }
    allowed = {
        # imported when a request needs it; an error names it if it is not installed
        "engine": {"slipstream/engine/constraints/guided.py": {"llguidance"}},
        "kernels": {"slipstream/kernels/cpu/compiler/build.py": {"llvmlite"}},
    }
    assert extras == allowed.get(folder, {})


def test_optional_libraries_are_not_imported_with_the_engine():
    code = "import sys, slipstream.engine.constraints.guided; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "name", ["scheduler", "blocks", "rows", "sampler", "scores", "pooling", "start", "handle"]
)
def test_planning_does_not_import_torch(name):
    code = f"import sys, slipstream.engine.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_transformers_is_imported_by_tests_only():
    assert [file.name for file in FILES if "transformers" in third_party_imports(file)] == []


def test_every_package_that_is_imported_is_declared():
    """A package that is only installed as a dependency of another may disappear."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + [
        line for name, lines in extras.items() if name != "test" for line in lines
    ]
    wanted = " ".join(declared).lower().replace("_", "-").split()
    names = {
        line.split(";")[0].split("[")[0].split(">")[0].split("<")[0].split("=")[0]
        for line in wanted
    }
    names |= {"triton"}  # a part of torch
    # run only when the protocol changes
    builds = {"slipstream/server/grpc/protocol/compile_proto.py"}
    distributions = packages_distributions()
    missing = {}
    for file in FILES:
        for module in third_party_imports(file) if file.name not in builds else ():
            owners = {
                owner.lower().replace("_", "-") for owner in distributions.get(module, [module])
            }
            if module != "google" and not owners & names:
                missing.setdefault(module, file.name)
    assert missing == {}


def test_the_server_process_does_not_import_torch():
    modules = [
        "slipstream.cli.main",
        "slipstream.cli.start",
        "slipstream.cli.infer",
        "slipstream.server.lifecycle",
        "slipstream.server.services",
        "slipstream.server.engine_link.client",
        "slipstream.server.http.routes",
        "slipstream.server.kserve.inference",
    ]
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "[]\n", "")


def test_init_modules_have_no_code():
    """Importing a module must not run code of its packages. A docstring is allowed."""
    inner = [
        file for file in FILES if file.path.name == "__init__.py" and file.path.parent != PACKAGE
    ]
    assert inner
    assert [
        file.name for file in inner if file.tree.body[1:] or file.tree.body != _docstring(file)
    ] == []


def _docstring(file: SourceFile) -> list[ast.stmt]:
    return file.tree.body[:1] if ast.get_docstring(file.tree) is not None else []


def test_no_file_is_over_the_line_limit():
    long = {file.name: len(file.text.splitlines()) for file in FILES if file.name not in GENERATED}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def unreadable_annotations(file: SourceFile) -> list[str]:
    """Return the annotations of Triton kernels that Triton's compiler cannot evaluate."""
    found = []
    for node in file.nodes:
        if not isinstance(node, ast.FunctionDef):
            continue
        if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        annotations = [argument.annotation for argument in node.args.args] + [node.returns]
        texts = [ast.unparse(annotation) for annotation in annotations if annotation is not None]
        if set(texts) - {"tl.constexpr"}:
            found.append(f"{file.name}:{node.lineno} {node.name}")
    return found


def test_triton_kernels_are_annotated_with_constexpr_only():
    """The compiler evaluates annotations, and cannot resolve global names such as `Any`."""
    assert [found for file in FILES for found in unreadable_annotations(file)] == []


def test_an_annotation_that_triton_cannot_read_is_found():
    text = "@triton.jit\ndef kernel(x: Any, SIZE: tl.constexpr):\n    pass"
    assert unreadable_annotations(source(text)) == ["slipstream/server/example.py:2 kernel"]
    assert unreadable_annotations(source(text.replace(": Any", ""))) == []
