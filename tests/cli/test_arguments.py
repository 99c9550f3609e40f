"""The parser that all commands share: spellings, defaults in the help, limits and errors."""

from __future__ import annotations

import pytest
from command_line import run_cli

from slipstream.cli.arguments import Parser, at_least, close_options
from slipstream.cli.commands import run_command


@pytest.fixture
def parser() -> Parser:
    parser = Parser("prog", "Do something.")
    parser.add_argument("file", help="File to read.")
    parser.add_argument("--max_batch_size", type=int, default=8, help="Size of a batch.")
    parser.add_argument("--max-input-len", type=int, help="Length of the input.")
    parser.add_argument("--seconds", type=at_least(1), default=60.0, help="Time to wait.")
    load = parser.alternatives()
    load.add_argument("--rate", type=float, help="Requests a second.")
    load.add_argument("--concurrency", type=at_least(1, int), help="Requests in flight.")
    parser.no_effect_group().add_argument("--old", action="store_true", help="Ignored.")
    return parser


@pytest.mark.parametrize(
    "words",
    [
        ["--max_batch_size", "4"],
        ["--max-batch-size", "4"],
        ["--max-batch-size=4"],
        ["--max_batch", "4"],
        ["--max-batch=4"],
    ],
)
def test_every_spelling_of_an_option_is_accepted(parser: Parser, words: list[str]) -> None:
    assert parser.parse(["x", *words]).max_batch_size == 4


def test_a_text_with_spaces_is_a_value_even_after_dashes(parser: Parser) -> None:
    assert parser.parse(["--text=a b"]).file == "--text=a b"


def test_words_after_two_dashes_are_not_changed(parser: Parser) -> None:
    assert parser.parse(["--", "--max-batch_size"]).file == "--max-batch_size"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["x", "--max_bach_size", "4"],
            "there is no option --max_bach_size; did you mean --max_batch_size?",
        ),
        (["--zzz"], "there is no option --zzz"),
        (["x", "y"], "unexpected argument 'y'"),
        ([], "the following arguments are required: file"),
        (
            ["x", "--seconds", "0.5"],
            "argument --seconds: must be a number of at least 1, not '0.5'",
        ),
        (
            ["x", "--seconds", "nan"],
            "argument --seconds: must be a number of at least 1, not 'nan'",
        ),
        (
            ["x", "--concurrency", "1.5"],
            "argument --concurrency: must be a whole number of at least 1, not '1.5'",
        ),
        (
            ["x", "--rate", "1", "--concurrency", "2"],
            "argument --concurrency: not allowed with argument --rate",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    parser: Parser, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {text} (see prog --help)\n"


def test_help_states_defaults_and_has_a_short_usage(
    parser: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = parser.format_help()
    assert text.startswith("usage: prog [options] file\n\nDo something.\n")
    assert "Size of a batch (default: 8).\n" in text
    assert "Time to wait (default: 60).\n" in text
    assert "Length of the input.\n" in text
    assert text.endswith(
        "accepted for compatibility; no effect:\n  --old                 Ignored.\n"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["convert"], "--model_dir is required: a Hugging Face folder, a GGUF file or a hub id"),
        (["bench"], "-m is required: the name of the text model"),
    ],
)
def test_a_missing_option_that_a_command_finds_itself_is_a_usage_error(
    words: list[str], text: str
) -> None:
    result = run_cli(words)
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: {text} (see slipstream {words[0]} --help)\n",
    )


def test_a_workload_without_its_options_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("benchmark-core-model", ["token_norm_dist", "--input-mean", "3"])
    assert ended.value.code == 2
    missing = "--input-stdev, --output-mean, --output-stdev"
    assert f"token-norm-dist requires {missing} (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("--port", ["--http-port", "--grpc-port", "--metrics-port"]),
        ("--prot", ["--http-port", "--grpc-port", "--metrics-port"]),
        ("--http-prot", ["--http-port"]),
        ("--max-model-length", ["--max_model_len"]),
        ("--temprature", []),
    ],
)
def test_an_unknown_option_suggests_near_names_and_near_words(
    name: str, options: list[str]
) -> None:
    known = ["--repo", "--http-port", "--grpc-port", "--metrics-port", "--max_model_len"]
    declared = {option.replace("_", "-"): option for option in known}
    assert close_options(name, declared) == options
