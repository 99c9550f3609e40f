"""The grammar of fill_template, and its report of unused and unfilled variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli.commands import run_command
from slipstream.repository.fill import FillError, fill_text, parse_substitutions, report
from slipstream.repository.releases.render import render_template


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a:1,b:2", {"a": "1", "b": "2"}),
        ("max_tokens_in_paged_kv_cache:,x:y", {"max_tokens_in_paged_kv_cache": "", "x": "y"}),
        ("tokenizer_dir:http://host/x", {"tokenizer_dir": "http://host/x"}),
        (r"a:1\,2,b:x\:y,c:back\\slash", {"a": "1,2", "b": "x:y", "c": r"back\slash"}),
        (r"a:C\dir", {"a": r"C\dir"}),
    ],
)
def test_substitutions_are_parsed(text: str, values: dict[str, str]) -> None:
    assert parse_substitutions(text) == values


@pytest.mark.parametrize("text", ["a", "a:1,b", ":x"])
def test_a_piece_without_key_and_value_is_refused_by_name(text: str) -> None:
    with pytest.raises(FillError, match="is not key:value"):
        parse_substitutions(text)


def test_both_forms_of_a_variable_are_filled_and_other_text_is_kept() -> None:
    filled = fill_text('a: "${x}" b: $y c: $$z d: ${left}', {"x": "1", "y": "2", "surplus": "3"})
    assert filled.text == 'a: "1" b: 2 c: $z d: ${left}'
    assert (filled.unknown, filled.left) == (("surplus",), ("left",))


def test_a_misspelt_key_is_reported_with_the_nearest_one() -> None:
    text = "max_batch_size: ${triton_max_batch_size} q: ${max_queue_size}"
    lines = report("f", fill_text(text, {"triton_max_batch": "4"}))
    assert lines == [
        "f: no variable ${triton_max_batch} in it, 'triton_max_batch' was not used; "
        "did you mean 'triton_max_batch_size'?",
        "f: not filled, so their defaults are used: triton_max_batch_size",
    ]


def test_a_key_that_is_given_is_not_suggested() -> None:
    filled = fill_text(
        "d: ${tokenizer_dir} t: ${tokens}", {"tokenizer_dir": "/x", "tokenizer_di": "/x"}
    )
    assert (
        report("f", filled)[0]
        == "f: no variable ${tokenizer_di} in it, 'tokenizer_di' was not used"
    )
    # a variable with a value of its own can still be meant
    (line, *_) = report("f", fill_text("q: ${max_queue_size}", {"max_queue_siz": "1"}))
    assert line.endswith("'max_queue_siz' was not used; did you mean 'max_queue_size'?")


def test_a_key_of_other_templates_is_reported_with_their_releases() -> None:
    template = render_template("inflight_batcher_llm", "preprocessing", "v0.10")
    values = {"tokenizer_dir": "/x", "tokenizer_type": "auto", "bls_instance_count": "1"}
    lines = report("f", fill_text(template, values))
    assert [line.partition("was not used; ")[2] for line in lines[:2]] == [
        "other templates have it: preprocessing (2023-09 to 2024-01), "
        "postprocessing (2023-09 to 2024-01)",
        "other templates have it: tensorrt_llm_bls (2024-01 to v0.18)",
    ]


def test_fill_writes_in_place_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("n: ${n}\n")
    assert run_command("fill", [str(file), "n:1"]) == 0
    assert capsys.readouterr().out == "n: 1\n\n"
    assert file.read_text() == "n: ${n}\n"
    assert run_command("fill", ["-i", str(file), "n:1"]) == 0
    assert file.read_text() == "n: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.pbtxt"]
