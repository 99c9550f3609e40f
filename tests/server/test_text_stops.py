"""The stop word filter against plain searching, on alphabets small enough for words to overlap all
the time.
"""

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
def test_equal_to_searching_the_whole_text(pieces, stops, shown):
    stop_filter = StopWordFilter(StopWords(stops, shown))
    given_out = [stop_filter.push(piece) for piece in pieces]
    given_out.append(stop_filter.finish())
    text = "".join(pieces)
    assert "".join(given_out) == expected(text, stops, shown)
    assert stop_filter.stopped == (expected(text, stops) != text)


@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet="abc", max_size=30), stops=words)
def test_never_too_much_and_never_held_without_cause(text, stops):
    """After each character, exactly what no continuation can make part of a stop word has been
    given out.
    """
    stop_filter, given_out = StopWordFilter(stops), ""
    for position, char in enumerate(text, start=1):
        given_out += stop_filter.push(char)
        read = text[:position]
        if stop_filter.stopped:
            assert given_out == expected(read, stops)
            return
        possible = [
            len(read) - n for stop in stops for n in range(1, len(stop)) if read.endswith(stop[:n])
        ]
        assert given_out == read[: min(possible, default=len(read))]


@settings(deadline=None)
@given(text=st.text(alphabet="ab", max_size=12), stops=words)
def test_at_the_same_place_the_word_completed_first_wins(text, stops):
    """It stops as soon as the earliest match is certain, so a longer word at the same place never
    delays it.
    """
    stop_filter = StopWordFilter(stops)
    for position, char in enumerate(text, start=1):
        stop_filter.push(char)
        at_zero = [stop for stop in stops if text[:position].startswith(stop)]
        if at_zero:
            assert stop_filter.stopped
            return


def test_a_long_stop_word_is_read_in_one_pass():
    """A word that almost repeats inside itself makes naive searching quadratic; here each character
    steps once.
    """
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


def test_texts_that_share_their_words_do_not_share_where_they_are() -> None:
    words = StopWords(["END", "", "STOP"])
    first, second = StopWordFilter(words), StopWordFilter(words)
    assert [first.push("aEN"), second.push("bST"), first.push("Xc"), second.push("OPx")] == [
        "a",
        "b",
        "ENXc",
        "",
    ]
    assert (first.stopped, second.stopped) == (False, True)
