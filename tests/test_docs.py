"""The documents have short lines and narrow tables, and every page is on the site."""

import re
import runpy

import pytest
from source_tree import PACKAGE, ROOT

MAX_CELL = 100
MAX_LINE = 120
MAX_GPU_GUIDE_LINES = 120
MAX_README_LINES = 80  # two screens
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*PAGES, *ROOT.glob("*.md")]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]


def prose(text: str) -> list[str]:
    """Return the lines outside of code blocks and tables."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in outside.splitlines() if not line.startswith(("|", "    "))]


def table_cells(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


@pytest.mark.parametrize("name", NAMES)
def test_table_cells_are_short(name):
    cells = table_cells((ROOT / name).read_text("utf-8"))
    assert [cell for cell in cells if len(cell) > MAX_CELL] == []


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_prose_are_short(name):
    lines = prose((ROOT / name).read_text("utf-8"))
    assert [line for line in lines if len(line) > MAX_LINE and "](" not in line] == []


def test_wide_cells_are_found():
    text = "| a | " + "b" * (MAX_CELL + 1) + " |\n| `x\\|y` | c |"
    assert table_cells(text) == ["a", "b" * (MAX_CELL + 1), "`x\\|y`", "c"]


def test_every_page_is_on_the_site():
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r": ([\w/-]+\.md)$", site, re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}


def test_the_gpu_guide_and_the_readme_stay_short():
    guide = (ROOT / "docs" / "gpu.md").read_text("utf-8").splitlines()
    readme = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(guide) <= MAX_GPU_GUIDE_LINES
    assert len(readme) <= MAX_README_LINES


PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")


def quoted_paths(text: str) -> list[str]:
    """Return the paths in backticks, such as `engine/loop.py` and `server/text/`."""
    quoted = re.findall(r"`([^`\n]+)`", text)
    return [name for name in quoted if "/" in name and PATH.fullmatch(name)]


def listed_paths(text: str) -> list[str]:
    """Return the paths in the first column of indented lists.

    A name without an inner slash belongs to the folder that is less indented and comes before it.
    """
    found: list[str] = []
    folders: dict[int, str] = {}
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip())
        if indentation < 4:
            folders = {}
            continue
        folders = {depth: folder for depth, folder in folders.items() if depth < indentation}
        enclosing = folders[max(folders)] if folders else ""
        for name in re.split(r"\s{2,}", line.strip())[0].split(", "):
            if not PATH.fullmatch(name) or not name.endswith(("/", ".py")):
                continue
            path = name if "/" in name.rstrip("/") else enclosing + name
            found.append(path)
            if path.endswith("/"):
                folders[indentation] = path
    return found


def exists(path: str) -> bool:
    return any(
        (root / path).is_dir() if path.endswith("/") else (root / path).exists()
        for root in (ROOT, PACKAGE)
    )


@pytest.mark.parametrize("name", ["docs/design.md", "CONTRIBUTING.md"])
def test_named_paths_exist(name):
    text = (ROOT / name).read_text("utf-8")
    paths = quoted_paths(text) + listed_paths(text)
    assert len(paths) >= 15
    assert [path for path in paths if not exists(path)] == []


def test_paths_are_found_in_text_and_in_lists():
    text = """
See `engine/loop.py`, `server/text/`, `config.json`, `a / b` and `/v2/health/live`.

    slipstream/
      cli/           one file per command: and/or
        compat/      scripts
      llm.py         the engine
      model/rope.py, kernels/   two paths

    server/http/, bottom to top
      routes.py      after a blank line
    pip install -e '.[test]' && pytest
"""
    assert quoted_paths(text) == ["engine/loop.py", "server/text/"]
    assert listed_paths(text) == [
        "slipstream/",
        "slipstream/cli/",
        "slipstream/cli/compat/",
        "slipstream/llm.py",
        "model/rope.py",
        "slipstream/kernels/",
        "server/http/",
        "server/http/routes.py",
    ]


def test_missing_paths_are_found():
    assert exists("engine/loop.py")
    assert exists("tests/support/")
    assert not exists("engine/no_such_module.py")
    assert not exists("engine/loop.py/")


def generated_pages() -> dict[str, str]:
    path = ROOT / "docs" / "generate.py"
    program = runpy.run_path(str(path))
    return {name: render() for name, render in program["PAGES"].items()}


def test_generated_pages_are_up_to_date():
    """Run `python docs/generate.py` when this fails."""
    written = {name: (ROOT / "docs" / name).read_text("utf-8") for name in generated_pages()}
    assert written == generated_pages()
