"""The contents of a wheel, checked without building one."""

import tomllib

from source_tree import PACKAGE, ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def shipped_data() -> set[str]:
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["slipstream"]
    return {
        path.relative_to(PACKAGE).as_posix()
        for pattern in patterns
        for path in PACKAGE.glob(pattern)
    }


def test_every_data_file_is_shipped():
    """A template that is missing from the wheel would work in a checkout only."""
    data = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".pyi")
    }
    assert {
        "py.typed",
        "server/http/docs.html",
        "server/http/page/index.html",
        "server/http/page/app.js",
        "server/http/page/style.css",
        "repository/templates/ensemble.pbtxt",
    } <= data
    assert data - shipped_data() == set()


def test_every_folder_of_code_is_a_package():
    """setuptools leaves out a folder without __init__.py."""
    folders = {path.parent for path in PACKAGE.rglob("*.py") if "templates" not in path.parts}
    assert [
        folder.relative_to(ROOT).as_posix()
        for folder in folders
        if not (folder / "__init__.py").exists()
    ] == []


def test_torch_has_the_tested_version_range():
    torch = next(line for line in SETTINGS["project"]["dependencies"] if line.startswith("torch"))
    assert torch == "torch>=2.11,<2.14"
