"""A dropped, misspelt or retyped key of a template is reported with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pbtxt_mutants import Mutant, mutants
from tiny_text import write_engine_folder

from slipstream.repository.check import check_repository
from slipstream.repository.fill import fill_text
from slipstream.repository.releases.render import render_template
from slipstream.repository.releases.tables import REPOSITORIES, list_models

RELEASE = "v0.10"
CASES = [("inflight_batcher_llm", model) for model in REPOSITORIES["inflight_batcher_llm"]]
CASES += [("gpt", model) for model in REPOSITORIES["gpt"]]
MAX_PER_FILE = 40  # largest number of mutants per file, spread evenly over the file


def write_repository(folder: Path, kind: str) -> Path:
    engine = write_engine_folder(folder / "engine")
    values = {
        "engine_dir": str(engine),
        "tokenizer_dir": str(engine),
        "exclude_input_in_output": "True",
        "triton_max_batch_size": "4",
        "decoupled_mode": "False",
    }
    for model in list_models(kind, RELEASE):
        (folder / "models" / model / "1").mkdir(parents=True)
        text = render_template(kind, model, RELEASE)
        (folder / "models" / model / "config.pbtxt").write_text(fill_text(text, values).text)
    return folder / "models"


def select_mutants(text: str) -> list[Mutant]:
    found = list(mutants(text))
    step = max(1, len(found) // MAX_PER_FILE)
    # the three kinds of damage alternate, so a step that is no multiple of 3 selects all of them
    return found[:: step if step % 3 else step + 1]


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_every_damaged_key_is_reported_with_its_file_and_line(
    tmp_path: Path, kind: str, model: str
) -> None:
    repository = write_repository(tmp_path, kind)
    file = repository / model / "config.pbtxt"
    text = file.read_text()
    before = {str(problem) for problem in check_repository(repository).found}
    unnoticed = []
    for mutant in select_mutants(text):
        file.write_text(mutant.text)
        new = [
            problem for problem in check_repository(repository).found if str(problem) not in before
        ]
        here = [problem for problem in new if problem.file == str(file) and problem.line > 0]
        word = mutant.key[:-1]
        if mutant.key in ("key", "value"):
            word = ""  # the report names the entry, not its "key" or "value"
        named = [problem for problem in here if word in f"{problem.key} {problem.text}"]
        if mutant.kind != "dropped":
            # a list is reported at its items, which may be on the line below its name
            named = [problem for problem in named if problem.line in (mutant.line, mutant.line + 1)]
        if not named:
            unnoticed.append(
                (mutant.kind, mutant.key, mutant.line, [str(problem) for problem in new][:3])
            )
    assert not unnoticed, "\n".join(map(str, unnoticed))


def test_at_least_300_mutants_are_checked(tmp_path: Path) -> None:
    templates = [render_template(kind, model, RELEASE) for kind, model in CASES]
    assert sum(len(select_mutants(text)) for text in templates) >= 300


def test_an_undamaged_repository_has_no_errors_and_only_unfilled_variables(tmp_path: Path) -> None:
    problems = check_repository(write_repository(tmp_path, "inflight_batcher_llm"))
    assert problems.errors == ()
    assert all("not filled" in problem.text for problem in problems.warnings)
