"""The stop word filter equals plain search, on small alphabets in which words often overlap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.server.text.stream import StopWordFilter, StopWords

words = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], shown: bool = False) -> str:
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return text
    start, size = min(found)
    return text[: start + size if shown else start]


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
    stops=words,
    shown=st.booleans(),
)
def test_filtered_text_equals_a_search_in_the_whole_text(pieces, stops, shown):
    stop_filter = StopWordFilter(StopWords(stops, shown))
    output = [stop_filter.push(piece) for piece in pieces]
    output.append(stop_filter.finish())
    text = "".join(pieces)
    assert "".join(output) == expected(text, stops, shown)
    assert stop_filter.stopped == (expected(text, stops) != text)


@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet="abc", max_size=30), stops=words)
def test_only_possible_beginnings_of_a_stop_word_are_held_back(text, stops):
    """After each character, the output is all text that cannot become part of a stop word."""
    stop_filter = StopWordFilter(stops)
    output = ""
    for position, char in enumerate(text, start=1):
        output += stop_filter.push(char)
        read = text[:position]
        if stop_filter.stopped:
            assert output == expected(read, stops)
            return
        possible = [
            len(read) - n for stop in stops for n in range(1, len(stop)) if read.endswith(stop[:n])
        ]
        assert output == read[: min(possible, default=len(read))]


@settings(deadline=None)
@given(text=st.text(alphabet="ab", max_size=12), stops=words)
def test_filter_stops_at_the_word_that_is_completed_first(text, stops):
    """A longer stop word at the same position does not delay the stop."""
    stop_filter = StopWordFilter(stops)
    for position, char in enumerate(text, start=1):
        stop_filter.push(char)
        at_zero = [stop for stop in stops if text[:position].startswith(stop)]
        if at_zero:
            assert stop_filter.stopped
            return


def test_each_character_is_matched_in_one_step():
    """A naive search is quadratic for a word with repeated prefixes."""
    stop = "a" * 2000 + "b"
    stop_filter = StopWordFilter([stop])
    steps = 0
    original = stop_filter._automaton.step

    def counted(state, char):
        nonlocal steps
        steps += 1
        return original(state, char)

    stop_filter._automaton.step = counted
    assert stop_filter.push("a" * 5000) == "a" * 3000
    assert stop_filter.push("b") == ""
    assert stop_filter.stopped
    assert steps == 5001


def test_filters_with_shared_stop_words_have_separate_positions() -> None:
    words = StopWords(["END", "", "STOP"])
    first = StopWordFilter(words)
    second = StopWordFilter(words)
    assert [first.push("aEN"), second.push("bST"), first.push("Xc"), second.push("OPx")] == [
        "a",
        "b",
        "ENXc",
        "",
    ]
    assert (first.stopped, second.stopped) == (False, True)
