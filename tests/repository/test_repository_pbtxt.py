"""The parser of the text format: it reads back what was written, and errors have their line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.repository.pbtxt import (
    MAX_DEPTH,
    MAX_VALUES,
    Field,
    Message,
    PbtxtError,
    Scalar,
    parse_pbtxt,
)

Tree = list[tuple[str, "str | Tree | tuple[str, str]"]]

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(
    st.tuples(st.just("string"), texts),
    st.tuples(st.just("number"), st.integers(-(2**40), 2**40).map(str)),
    st.tuples(st.just("number"), st.sampled_from(["1.5", "-2.5e-3", "0x1f", "1e9", ".5", "3f"])),
    st.tuples(st.just("word"), st.sampled_from(["true", "False", "TYPE_INT32", "inf"])),
    st.tuples(st.just("placeholder"), st.from_regex(r"[a-z_]{1,8}", fullmatch=True)),
)
trees = st.recursive(
    st.lists(st.tuples(names, scalars), max_size=4),
    lambda children: st.lists(st.tuples(names, st.one_of(scalars, children)), max_size=4),
    max_leaves=12,
)


def write_string(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    )
    return f'"{escaped}"'


def write(tree: Tree, choice: st.DataObject | None = None, indent: str = "") -> str:
    """Return the tree as text. `choice` picks among equivalent spellings."""
    pick = (
        (lambda options: choice.draw(st.sampled_from(options)))
        if choice
        else (lambda options: options[0])
    )
    lines = []
    for name, value in tree:
        if isinstance(value, list):
            opening, closing = pick(["{}", "<>"])
            colon = pick(["", ":"])
            lines.append(
                f"{indent}{name}{colon} {opening}\n{write(value, choice, indent + '  ')}{indent}{closing}"
            )
        else:
            kind, text = value
            written = {"string": write_string(text), "placeholder": f"${{{text}}}"}.get(kind, text)
            listed = pick([written, f"[ {written} ]", f"[{written},]"])
            lines.append(f"{indent}{name}: {listed}{pick(['', ',', ';', '  # why'])}")
    return "".join(line + pick(["\n", "\n\n"]) for line in lines)


def as_tree(message: Message) -> Tree:
    return [
        (
            item.name,
            as_tree(item.value)
            if isinstance(item.value, Message)
            else (item.value.kind, item.value.text),
        )
        for item in message.fields
    ]


@settings(deadline=None)
@given(trees, st.data())
def test_a_tree_written_in_any_spelling_is_parsed_back(tree: Tree, data: st.DataObject) -> None:
    assert as_tree(parse_pbtxt(write(tree, data))) == tree


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused_with_a_line_number(text: str) -> None:
    line = 1
    try:
        parse_pbtxt(text)
    except PbtxtError as error:
        line = error.line
    assert 1 <= line <= text.count("\n") + 1


def test_fields_have_the_line_numbers_of_the_file() -> None:
    message = parse_pbtxt('# a comment\nname: "x"\ninput [\n  { name: "a" },\n  { name: "b" }\n]\n')
    assert [(item.name, item.line) for item in message.fields] == [
        ("name", 2),
        ("input", 4),
        ("input", 5),
    ]


def test_a_list_becomes_repeated_fields() -> None:
    expected = tuple(Field("dims", Scalar("number", text, 1), 1) for text in ("-1", "2"))
    assert parse_pbtxt("dims: [ -1, 2 ]").fields == expected
    assert parse_pbtxt("dims: [ -1 2 ]").fields == expected
    assert parse_pbtxt("dims: -1 dims: 2").fields == expected


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r'"a" "b"', "ab"),
        ("'it''s'", "its"),
        (r'"\x41\102\u0043"', "ABC"),
        (r'"\xc3\xa9 \U0001F600"', "é 😀"),
        (r'"tab\there\\ \"q\""', 'tab\there\\ "q"'),
        ('"${tokenizer_dir}"', "${tokenizer_dir}"),
    ],
)
def test_strings_are_unescaped(written: str, text: str) -> None:
    assert as_tree(parse_pbtxt(f"a: {written}")) == [("a", ("string", text))]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('name: "x"\nbackend "python"', 2, "expected ':' or '{' after 'backend'"),
        ('name: "x\nbackend: "y"', 1, "a string is not closed on its line"),
        ("input [ {\n name: 1\n", 3, "'}' is missing before the end of the file"),
        ("a: 1\n}", 2, "expected the name of a field, got }"),
        ("a:\nb: 1", 2, "expected the name of a field, got :"),
        ("max_batch_size: ${x", 1, "a '${' placeholder is not closed"),
        ("a: @", 1, "unexpected character '@'"),
        (r'a: "\q"', 1, r"unknown escape '\q'"),
        (r'a: "\9"', 1, r"unknown escape '\9'"),
        (r'a: "\xff"', 1, "a string is not UTF-8"),
        ("a {" * (MAX_DEPTH + 1), 1, f"more than {MAX_DEPTH} levels"),
        # what follows a mistake is not read
        ("a {" * (MAX_DEPTH + 9) + "@", 1, f"more than {MAX_DEPTH} levels"),
    ],
)
def test_errors_have_line_and_text(text: str, line: int, says: str) -> None:
    with pytest.raises(PbtxtError) as caught:
        parse_pbtxt(text)
    assert caught.value.line == line
    assert says in caught.value.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "' + "a" * 70_000 + '"', "a string of 70002 characters; at most 65536 are read"),
        ("a" * 300 + ": 1", "a word of 300 characters; at most 256 are read"),
        ("dims: [" + "1," * (MAX_VALUES + 1) + "]", "more than 20000 fields and items of lists"),
        ("input { }" * (MAX_VALUES + 1), "more than 20000 fields and items of lists"),
        ("name: " + '""' * (MAX_VALUES + 1), "more than 20000 fields and items of lists"),
    ],
    ids=["string", "word", "items", "messages", "adjacent strings"],
)
def test_files_that_no_model_needs_are_refused_before_the_end(text: str, message: str) -> None:
    with pytest.raises(PbtxtError, match=message):
        parse_pbtxt(text + "\n@")  # which would be another error


def test_comments_and_blanks_do_not_count() -> None:
    text = "#\n \t# more\n" * 100_000
    assert parse_pbtxt(text + "a: 1").fields == (
        Field("a", Scalar("number", "1", 200_001), 200_001),
    )
