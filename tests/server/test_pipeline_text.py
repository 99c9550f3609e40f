"""The text generator over a scripted engine: its requests, outputs and cancellations."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.messages import EngineInfo
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.engine_link.mailbox import RequestOutput
from slipstream.server.text import pipeline
from slipstream.server.text.chat import ChatError, render_chat
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.pipeline import PromptError, TextGenerator, bad_word_tokens
from slipstream.server.text.sandbox import BRIEF_STEPS
from slipstream.server.text.threads import THREAD_ABOVE_SIZE
from slipstream.server.text.tokenizer import Tokenizer

INFO = EngineInfo(
    vocab_size=1000,
    max_sequence_tokens=64,
    max_rows=4,
    total_blocks=8,
    block_tokens=32,
    device="cpu",
    dtype="float32",
    weight_bytes=0,
    cache_bytes=0,
    load_seconds=0.0,
)


@dataclass
class ScriptedRequest:
    """Returns its outputs one per read, then waits forever, like an unfinished request."""

    deltas: list[RequestOutput]
    request_id: int = 1
    cancelled: list[str] = field(default_factory=list)

    def cancel(self, reason: str = "cancelled") -> None:
        self.cancelled.append(reason)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self.deltas:
            await asyncio.Event().wait()
        return self.deltas.pop(0)


@dataclass
class ScriptedEngine:
    deltas: list[RequestOutput] = field(default_factory=list)
    info: EngineInfo | None = INFO
    ready: bool = True

    def submit(self, request):
        self.prompt = request.prompt
        self.sampling = request.sampling
        self.rest = (request.priority, request.deadline, request.cache_salt)
        self.in_flight = ScriptedRequest(list(self.deltas))
        return self.in_flight


@functools.cache
def load(kind: str = "byte_level") -> Tokenizer:
    return Tokenizer.load(samples.ALL[kind]())


def speak(
    text: str, *more: RequestOutput, chunk: int = 1, kind: str = "byte_level"
) -> list[RequestOutput]:
    ids = load(kind).encode(text, False)
    return [*(RequestOutput(tokens=ids[i : i + chunk]) for i in range(0, len(ids), chunk)), *more]


async def collect(
    engine: ScriptedEngine, request: TextRequest, kind: str = "byte_level"
) -> list[TextOutput]:
    async with (
        asyncio.timeout(10),
        aclosing(TextGenerator(load(kind), engine).generate(request)) as deltas,
    ):
        return [delta async for delta in deltas]


def text_of(deltas: list[TextOutput]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_tokens_are_decoded_until_the_engine_finishes():
    engine = ScriptedEngine(
        speak("hello 日本 world", RequestOutput(finish_reason="length", cached_tokens=3))
    )
    deltas = await collect(engine, TextRequest("the dog"))
    assert text_of(deltas) == "hello 日本 world"
    assert [delta.finish_reason for delta in deltas] == [""] * (len(deltas) - 1) + ["length"]
    assert [token for delta in deltas for token in delta.tokens] == load().encode(
        "hello 日本 world", False
    )
    assert deltas[-1].cached_tokens == 3
    assert {delta.prompt_tokens for delta in deltas} == {len(engine.prompt)}
    assert engine.prompt == load().encode("the dog")
    assert engine.in_flight.cancelled == []


async def test_incomplete_character_is_emitted_with_the_last_output():
    half = load().encode("日", False)[:-1] or pytest.skip("one token")
    deltas = await collect(
        ScriptedEngine([RequestOutput(tokens=half), RequestOutput(finish_reason="length")]),
        TextRequest("x"),
    )
    assert [delta.text for delta in deltas] == ["", "\ufffd"]


# --- stop words ---


@settings(max_examples=100, deadline=None)
@given(
    text=samples.texts,
    chunk=st.integers(1, 7),
    stops=st.lists(st.text("ab <日", max_size=3), max_size=3),
)
def test_text_is_cut_at_the_first_stop_word_and_the_request_cancelled(text, chunk, stops):
    engine = ScriptedEngine(speak(text, RequestOutput(finish_reason="length"), chunk=chunk))
    deltas = asyncio.run(collect(engine, TextRequest("x", stop_words=stops)))
    whole = load().decode(load().encode(text, False))
    found = [whole.find(stop) for stop in stops if stop and stop in whole]
    assert text_of(deltas) == (whole[: min(found)] if found else whole)
    assert deltas[-1].finish_reason == ("stop" if found else "length")
    # true if the stop word matched only with the engine's last output
    ended_first = not engine.in_flight.deltas
    assert engine.in_flight.cancelled == (["stop"] if found and not ended_first else [])


async def test_tokens_and_log_probs_after_a_stop_word_are_dropped():
    ids = [token for letter in "abENDxy" for token in load().encode(letter, False)]
    numbers = [float(-i) for i in range(len(ids))]
    tops = [[(token, -0.5)] for token in ids]
    delta = RequestOutput(tokens=ids, log_probs=numbers, top_log_probs=tops)
    engine = ScriptedEngine([delta])
    (last,) = await collect(engine, TextRequest("x", stop_words=["END"]))
    assert last.text == "ab"
    assert last.tokens == ids[:5]
    assert last.log_probs == numbers[:5]
    assert last.top_log_probs == tops[:5]
    assert last.finish_reason == "stop"
    assert engine.in_flight.cancelled == ["stop"]


async def test_stop_word_completed_by_the_last_token_cancels_nothing():
    engine = ScriptedEngine(
        speak("ab", RequestOutput(tokens=load().encode("c", False), finish_reason="length"))
    )
    deltas = await collect(engine, TextRequest("x", stop_words=["bc", "abcd"]))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("a", "stop")
    assert engine.in_flight.cancelled == []


# --- the end of text ---


async def test_end_token_is_not_in_the_text_even_with_special_tokens():
    end = load().eos_id
    for skip in (True, False):
        engine = ScriptedEngine(speak("hi", RequestOutput(tokens=[end], finish_reason="stop")))
        deltas = await collect(engine, TextRequest("x", skip_special_tokens=skip))
        assert text_of(deltas) == "hi"
        assert engine.sampling.end_ids == (end,)


async def test_end_id_of_the_request_may_be_an_ordinary_word():
    (the,) = load().encode(" the", False)
    engine = ScriptedEngine(speak("hi", RequestOutput(tokens=[the], finish_reason="stop")))
    deltas = await collect(engine, TextRequest("x", replace(SamplingParams(), end_ids=(the,))))
    assert text_of(deltas) == "hi"
    assert engine.sampling.end_ids == (the,)


async def test_ignore_end_sends_no_end_ids():
    engine = ScriptedEngine(speak("a<|im_end|>b", RequestOutput(finish_reason="length")))
    deltas = await collect(engine, TextRequest("x", ignore_end=True))
    assert engine.sampling.end_ids == ()
    assert text_of(deltas) == "ab"


async def test_special_tokens_are_shown_on_request():
    engine = ScriptedEngine(speak("a<|im_start|>b", RequestOutput(finish_reason="length")))
    assert (
        text_of(await collect(engine, TextRequest("x", skip_special_tokens=False)))
        == "a<|im_start|>b"
    )


# --- requests to the engine ---


async def test_parameters_reach_the_engine_and_max_tokens_is_clipped():
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    sampling = SamplingParams(max_tokens=1000, temperature=0.5, seed=7, end_ids=(3, 4))
    request = TextRequest([5] * 60, sampling, priority=2, deadline=9.5, cache_salt="tenant")
    await collect(engine, request)
    assert engine.prompt == [5] * 60
    assert engine.sampling == replace(sampling, max_tokens=4, timing=True)
    assert engine.rest == (2, 9.5, "tenant")


async def test_max_tokens_that_fit_are_kept():
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    await collect(engine, TextRequest([5] * 10, SamplingParams(max_tokens=54)))
    assert engine.sampling.max_tokens == 54


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", PromptError, "The prompt is empty"),
        ([], PromptError, "The prompt is empty"),
        ([5] * 64, PromptError, r"^Prompt length \(64\) exceeds maximum input length \(63\)\.$"),
        ([5, -1], TokenizerError, "token id -1 "),
        ([5, 10**9], TokenizerError, "token id 1000000000 "),
        ("a\ud800", TokenizerError, "not valid Unicode"),
    ],
)
async def test_invalid_prompts_are_refused_before_the_engine(prompt, error, message):
    engine = ScriptedEngine()
    with pytest.raises(error, match=message):
        await collect(engine, TextRequest(prompt))
    assert not hasattr(engine, "prompt")


async def test_the_longest_prompt_that_fits_has_room_for_one_token():
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    await collect(engine, TextRequest([5] * 63, SamplingParams(max_tokens=9)))
    assert engine.sampling.max_tokens == 1


async def test_empty_prompt_is_the_beginning_token_if_there_is_one():
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    await collect(engine, TextRequest(""), "llama2_json")
    assert engine.prompt == [1]


async def test_special_tokens_are_not_added_if_disabled():
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    await collect(engine, TextRequest("hello", add_special_tokens=False), "llama2_json")
    assert engine.prompt == load("llama2_json").encode("hello", False)
    assert 1 not in engine.prompt


async def test_error_of_an_unavailable_engine_is_raised():
    class Gone(ScriptedEngine):
        def submit(self, *args, **kwargs):
            raise ConnectionError("it is loading")

    with pytest.raises(ConnectionError, match="it is loading"):
        await collect(Gone(info=None), TextRequest("x"))


async def test_long_texts_are_tokenised_outside_the_event_loop(monkeypatch):
    import threading

    threads = []
    original = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, *args: threads.append(threading.current_thread()) or original(self, *args),
    )
    for prompt in ("a", "a " * THREAD_ABOVE_SIZE):
        await collect(
            ScriptedEngine([RequestOutput(finish_reason="length")], info=None), TextRequest(prompt)
        )
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


# --- bad words ---


def words_of(kind: str, word: str) -> set[str]:
    """Return the texts whose tokens are forbidden, decoded in the middle of a text."""
    tokenizer = load(kind)
    before = tokenizer.encode("x", False)
    return {tokenizer.decode([*before, *ids])[1:] for ids in bad_word_tokens(tokenizer, [word])}


@pytest.mark.parametrize("kind", samples.SERVED)
def test_bad_words_are_forbidden_with_and_without_a_space(kind):
    assert words_of(kind, "dog") == {"dog", " dog"}


@pytest.mark.parametrize("kind", samples.SERVED)
def test_bad_words_contain_no_special_tokens_and_no_duplicates(kind):
    tokenizer = load(kind)
    sequences = bad_word_tokens(tokenizer, ["dog", "", "dog", "日本"])
    assert len(sequences) == len(set(sequences))
    assert all(sequences)
    assert not any(token in tokenizer.special_ids for sequence in sequences for token in sequence)


async def test_bad_words_are_added_to_those_given_as_tokens():
    engine = ScriptedEngine([RequestOutput(finish_reason="length")])
    dog = bad_word_tokens(load(), ["dog"])
    sampling = SamplingParams(bad_words=((9, 9), dog[0]))
    await collect(engine, TextRequest("x", sampling, bad_words=["dog", ""]))
    assert engine.sampling.bad_words == ((9, 9), *dog)


# --- cancellation and errors ---


async def test_closing_the_iterator_cancels_the_request():
    engine = ScriptedEngine(speak("hello world"))
    deltas = TextGenerator(load(), engine).generate(TextRequest("x"))
    await anext(deltas)
    assert engine.in_flight.cancelled == []
    await deltas.aclose()
    assert engine.in_flight.cancelled == ["cancelled"]


async def test_cancelling_a_waiting_reader_cancels_the_request():
    engine = ScriptedEngine([])
    task = asyncio.create_task(collect(engine, TextRequest("x")))
    while not hasattr(engine, "in_flight"):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.in_flight.cancelled == ["cancelled"]


async def test_an_error_of_the_engine_is_passed_on():
    engine = ScriptedEngine(
        speak("hi", RequestOutput(finish_reason="error", error="out of memory"))
    )
    deltas = await collect(engine, TextRequest("x"))
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].error) == (
        "hi",
        "error",
        "out of memory",
    )


async def test_unknown_token_from_the_engine_fails_and_cancels_the_request():
    engine = ScriptedEngine([RequestOutput(tokens=[10**6])])
    with pytest.raises(TokenizerError, match="token id 1000000 "):
        await collect(engine, TextRequest("x"))
    assert engine.in_flight.cancelled == ["cancelled"]


# --- conversations ---


async def test_chat_prompt_is_the_rendered_conversation_without_added_tokens(tmp_path):
    folder = samples.write_folder(
        "pipeline_chat",
        samples.byte_level_tokenizer(),
        config={
            "bos_token": "<|endoftext|>",
            "add_bos_token": True,
            "chat_template": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        },
    )
    tokenizer = Tokenizer.load(folder)
    generator = TextGenerator(tokenizer, ScriptedEngine())
    ids = await generator.chat_prompt([{"role": "user", "content": "hello"}])
    assert ids == tokenizer.encode("<|endoftext|><|im_start|>hello<|im_end|>", False)
    with pytest.raises(ChatError, match="at least one message"):
        await generator.chat_prompt([])


async def test_only_short_renderings_of_a_known_template_run_on_the_event_loop(monkeypatch):
    folder = samples.write_folder(
        "pipeline_brief_chat",
        samples.byte_level_tokenizer(),
        config={
            "chat_template": "{% for i in range(messages[0].content | int) %}ab {% endfor %}",
        },
    )
    threads: list[str] = []

    def render_here(*args, **options):
        threads.append(threading.current_thread().name)
        return render_chat(*args, **options)

    monkeypatch.setattr(pipeline, "render_chat", render_here)
    tokenizer = Tokenizer.load(folder)
    generator = TextGenerator(tokenizer, ScriptedEngine())
    own = threading.current_thread().name
    for count, on_loop in [(3, [False]), (3, [True]), (BRIEF_STEPS + 1, [True, False])]:
        threads.clear()
        ids = await generator.chat_prompt([{"role": "user", "content": str(count)}])
        assert ids == tokenizer.encode("ab " * count, False)
        assert [name == own for name in threads] == on_loop
    threads.clear()
    await generator.chat_prompt([{"role": "user", "content": "3"}], tools=[{"type": "function"}])
    assert own not in threads
