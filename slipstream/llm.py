"""A model in this process, without a server.

    from slipstream import LLM

    with LLM("smollm2-135m") as llm:
        for completion in llm.generate(["The capital of France is", "2 + 2 ="], max_tokens=16):
            print(completion.text, completion.finish_reason)
        print(llm.chat([{"role": "user", "content": "Hello!"}], temperature=0.7).text)

and in a coroutine: `async for piece in llm.stream("Once upon a time"): ...`
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np

from slipstream.engine.guided import KINDS
from slipstream.engine.messages import Scores
from slipstream.engine.request import Guide, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.server.adapters import AdapterBook, AdapterUse
from slipstream.server.engine_process import start_real_engine
from slipstream.server.in_process import InProcessEngine
from slipstream.server.limits import NUMBERS, Range
from slipstream.server.text.chat import Message
from slipstream.server.text.pipeline import TextDelta, TextGenerator, TextRequest
from slipstream.server.text.sequences import TextBeam
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.build import build_engine
from slipstream.weights.engine_config import EngineFolderError, find_engine_folder, read_engine_config
from slipstream.weights.home import slipstream_home

Prompt = str | Sequence[int]
Conversation = Sequence[Message]
Result = TypeVar("Result")

_BOUNDS: Mapping[str, Range] = {
    "max_tokens": NUMBERS["max_tokens"],
    "temperature": NUMBERS["temperature"],
    "top_k": NUMBERS["top_k"],
    "top_p": NUMBERS["top_p"],
    "min_p": Range(0.0, 1.0),
    "seed": NUMBERS["random_seed"],
    "repetition_penalty": NUMBERS["repetition_penalty"],
    "presence_penalty": NUMBERS["presence_penalty"],
    "frequency_penalty": NUMBERS["frequency_penalty"],
    "min_tokens": NUMBERS["min_length"],
    "no_repeat_ngram": NUMBERS["no_repeat_ngram_size"],
    "top_p_decay": NUMBERS["top_p_decay"],
    "top_p_min": NUMBERS["top_p_min"],
    "top_p_reset_id": NUMBERS["top_p_reset_ids"],
    "top_log_probs": NUMBERS["top_log_probs"],
    "n": NUMBERS["num_return_sequences"],
    "beam_width": NUMBERS["beam_width"],
    "length_penalty": NUMBERS["length_penalty"],
    "diversity_rate": NUMBERS["beam_search_diversity_rate"],
}


class GenerationFailed(RuntimeError):
    """The engine gave up on a request. The text is its reason."""


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer is written. The defaults are greedy: the most likely token each time.

    A `temperature` over 0 samples, from the `top_k` most likely tokens (0: all), from the most likely ones that
    together reach `top_p`, and from those at least `min_p` times as likely as the first. The same `seed` gives
    the same answer; without one each answer draws its own.

    `stop` ends the text before any of these words; `bad_words` never come. `end_ids` replace the model's own
    end-of-text tokens, `ignore_end` goes on past them, and `min_tokens` holds them off. `repetition_penalty`
    looks at prompt and answer, the other two at the answer only. `logit_bias` is added to the logits of tokens.
    `no_repeat_ngram` forbids a run of that many tokens to come twice. `top_p` may shrink by `top_p_decay` with each
    token, down to `top_p_min`, and begin anew after the token `top_p_reset_id`.

    `log_probs` and `top_log_probs` ask for the log-probability of each token and of the likeliest n,
    `prompt_log_probs` for that of each prompt token but the first; `context_logits` and `generation_logits` for the
    logits at each token of the prompt and of the answer.

    `guide_type` makes the answer obey `guide`: json (any object), json_schema, regex, ebnf_grammar, structural_tag,
    or choice (a list of texts). A schema or list may be given as such or as JSON text. Needs `slipstream[guided]`.

    `n` answers are drawn from the one prompt. A `beam_width` over 1 searches instead: its `n` best beams (all, where
    `n` is 1) are ranked by log-probability / length ** `length_penalty`; `early_stopping` ends the search when
    `beam_width` beams have ended (True), when a better one is not likely (False) or not possible ("never").

    Requests of different `cache_salt` share nothing in the KV cache: one for each tenant keeps them apart.

    `adapter` is the folder of a LoRA adapter, as peft or `slipstream lora` writes it. Answers with different adapters
    and with none are computed together.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    bad_words: str | Sequence[str] = ()
    end_ids: Sequence[int] = ()
    ignore_end: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    log_probs: bool = False
    top_log_probs: int = 0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    no_repeat_ngram: int = 0
    prompt_log_probs: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    guide_type: str = ""
    guide: str | Mapping[str, Any] | Sequence[str] = ""
    n: int = 1
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: bool | Literal["never"] = True
    diversity_rate: float = 0.0
    cache_salt: str = ""
    adapter: str | Path | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            rule = bound.refuses(value) if value is not None else ""
            if rule:
                raise ValueError(f"{name} {rule}, got {value}")
        if self.guide_type not in ("", *KINDS) or (self.guide and not self.guide_type):
            raise ValueError(f"guide_type must be one of {', '.join(KINDS)}, got {self.guide_type!r}")

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            end_ids=tuple(self.end_ids),
            logit_bias=tuple(self.logit_bias.items()),
            log_probs=self.log_probs,
            top_log_probs=self.top_log_probs,
            top_p_decay=self.top_p_decay,
            top_p_min=self.top_p_min,
            top_p_reset_id=self.top_p_reset_id,
            no_repeat_ngram=self.no_repeat_ngram,
            prompt_log_probs=self.prompt_log_probs,
            context_logits=self.context_logits,
            generation_logits=self.generation_logits,
            guide=self._guide(),
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=2 if self.early_stopping == "never" else int(self.early_stopping),
            diversity_rate=self.diversity_rate,
        )

    def _guide(self) -> Guide | None:
        if not self.guide_type:
            return None
        text = self.guide if isinstance(self.guide, str) else json.dumps(self.guide)
        return Guide(self.guide_type, text)

    def request(self, prompt: Prompt) -> TextRequest:
        return TextRequest(
            prompt=prompt if isinstance(prompt, str) else list(prompt),
            sampling=self.sampling(),
            bad_words=_words(self.bad_words),
            stop_words=_words(self.stop),
            add_special_tokens=self.add_special_tokens,
            skip_special_tokens=self.skip_special_tokens,
            ignore_end=self.ignore_end,
            sequences=self.n,
            cache_salt=self.cache_salt,
            adapter=_adapter(self.adapter),
        )


@dataclass(frozen=True)
class Completion:
    text: str
    tokens: list[int]
    finish_reason: str  # stop, length, cancelled or timeout
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the cache
    log_probs: list[float] | None = None
    top_log_probs: list[list[tuple[int, float]]] | None = None
    prompt_log_probs: list[float] | None = None  # of each prompt token but the first
    context_logits: np.ndarray | None = None  # float32 [prompt tokens, vocab]
    generation_logits: np.ndarray | None = None  # float32 [tokens, vocab]
    total_log_prob: float | None = None  # of a beam, its end included
    others: tuple[Completion, ...] = ()  # the other answers to the same prompt: of a search, best first


class LLM:
    """An engine and its tokenizer.

    `model` is an engine folder, a Hugging Face folder, a GGUF file, a hub id such as "Qwen/Qwen2.5-0.5B", or a
    known name such as "smollm2-135m". All but an engine folder are built once, into the `engines` folder under
    SLIPSTREAM_HOME (~/.cache/slipstream), and found there afterwards.

    `dtype` is what the engine computes in, and what a new build stores: auto, float32, bfloat16 or float16.
    `weight_only` ("int8", "fp8" or "int4") makes a new build smaller. `settings` are those of `EngineSettings`, such as
    max_rows, cache_tokens, max_sequence_tokens, reuse and threads.
    """

    def __init__(
        self, model: str | Path, dtype: str = "auto", *, weight_only: str | None = None, **settings: Any
    ) -> None:
        engine_settings = EngineSettings(dtype=dtype, **settings)
        self.folder = engine_folder(model, dtype, weight_only)
        self.tokenizer = Tokenizer.load(self.folder)
        self._engine = InProcessEngine(start_real_engine(str(self.folder), engine_settings))
        self._generator = TextGenerator(self.tokenizer, self._engine)
        self._caller = _EventLoopThread()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingOptions | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete one prompt or many at once; a prompt is a text or a list of token ids.

        `options` are the fields of `SamplingOptions`: max_tokens, temperature, top_k, top_p, min_p, seed, stop,
        bad_words, repetition_penalty, and so on. Answers are in the order of the prompts.
        """
        chosen = _options(sampling_params, options)
        requests = [chosen.request(prompt) for prompt in _prompts(prompts)]
        return self._caller.run(self._complete_all(requests))

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion:
        """The assistant's answer to a conversation, by the model's own chat template."""
        chosen = _options(sampling_params, options)

        async def answer() -> Completion:
            prompt = await self._generator.chat_prompt(messages, tools=tools, variables=template_variables)
            return await self._complete(chosen.request(prompt))

        return self._caller.run(answer())

    async def stream(
        self, prompt: Prompt | Conversation, sampling_params: SamplingOptions | None = None, **options: Any
    ) -> AsyncGenerator[str, None]:
        """The pieces of one answer as they are written. Leaving the loop early cancels the request."""
        chosen = _options(sampling_params, options)
        if chosen.n > 1:
            raise ValueError(f"a stream is one answer: n must be 1, got {chosen.n}")
        if _is_conversation(prompt):
            prompt = await self._generator.chat_prompt(cast(Conversation, prompt))
        async with aclosing(self._generator.generate(chosen.request(cast(Prompt, prompt)))) as deltas:
            async for delta in deltas:
                _check(delta)
                if delta.text:
                    yield delta.text

    def close(self) -> None:
        """Stop the engine and free its memory. Answers still being written fail."""
        self._engine.close()
        self._caller.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    async def _complete_all(self, requests: list[TextRequest]) -> list[Completion]:
        tasks = [asyncio.ensure_future(self._complete(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one has failed, or the caller was interrupted: the rest need not go on
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, request: TextRequest) -> Completion:
        async with aclosing(self._generator.generate(request)) as stream:
            deltas = [_check(delta) async for delta in stream]
        parts = [[delta for delta in deltas if delta.sequence == place] for place in range(request.sequences)]
        completions = [self._completion(request, part) for part in parts if part]
        if deltas[-1].beams:
            completions = [_of_beam(completions[0], beam, request.sampling.log_probs) for beam in deltas[-1].beams]
        first = completions[0]
        others = (replace(other, prompt_log_probs=first.prompt_log_probs, context_logits=first.context_logits)
                  for other in completions[1:])  # the prompt is the same, and scored once
        return replace(first, others=tuple(others))

    def _completion(self, request: TextRequest, deltas: Sequence[TextDelta]) -> Completion:
        return Completion(
            text="".join(delta.text for delta in deltas),
            tokens=[token for delta in deltas for token in delta.tokens],
            finish_reason=deltas[-1].finish_reason,
            prompt_tokens=deltas[-1].prompt_tokens,
            cached_tokens=max(delta.cached_tokens for delta in deltas),
            log_probs=_joined([delta.log_probs for delta in deltas]),
            top_log_probs=_joined([delta.top_log_probs for delta in deltas]),
            **self._scores(request.sampling, deltas),
        )

    def _scores(self, sampling: SamplingParams, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """The numbers that were asked for, by the names of Completion."""
        scores = Scores()
        for delta in deltas:
            scores.merge(delta.scores or Scores())
        width = self._engine.info.vocab_size if self._engine.info is not None else 1
        found: dict[str, Any] = {"prompt_log_probs": scores.prompt_log_probs} if sampling.prompt_log_probs else {}
        for name in ("context_logits", "generation_logits"):
            if getattr(sampling, name):
                found[name] = np.frombuffer(getattr(scores, name), dtype=np.float32).reshape(-1, width)
        return found


class _EventLoopThread:
    """An event loop for callers that have none, or that call from inside their own."""

    def __init__(self) -> None:
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._event_loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if self._event_loop.is_closed():
            coroutine.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._event_loop.is_closed():
            return
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join()
        self._event_loop.close()


def engine_folder(model: str | Path, dtype: str, weight_only: str | None) -> Path:
    """The engine folder that `model` is, or the one built from it."""
    path = Path(model).expanduser()
    if path.is_dir() and _is_engine(path):
        if weight_only is not None:
            raise ValueError(f"{path} is built already: weight_only must be given when it is built")
        return read_engine_config(path).path
    source = str(path.resolve()) if path.exists() else str(model)
    output = slipstream_home() / "engines" / _folder_name(source, dtype, weight_only)
    return build_engine(source, output, dtype=dtype, weight_only=weight_only)


def _is_engine(path: Path) -> bool:
    """Whether the folder is an engine, of whatever release: its reader then says what is wrong with it."""
    try:
        config = json.loads((find_engine_folder(path) / "config.json").read_text(encoding="utf-8"))
    except (EngineFolderError, OSError, ValueError):
        return False  # no config, or a broken one: the builder names what it misses
    return isinstance(config, dict) and "pretrained_config" in config


def _folder_name(source: str, dtype: str, weight_only: str | None) -> str:
    """A name that a person can read, made unique by what decides the build."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).name or "model")
    digest = hashlib.sha256(json.dumps([source, dtype, weight_only]).encode()).hexdigest()[:8]
    return "-".join(part for part in (readable, dtype, weight_only, digest) if part)


def _adapter(folder: str | Path | None) -> AdapterUse | None:
    if folder is None:
        return None
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"adapter must be the folder of an adapter, got '{folder}'")
    return AdapterBook().from_folder(path, f"adapter '{path.name}'")


def _options(given: SamplingOptions | None, options: dict[str, Any]) -> SamplingOptions:
    if given is None:
        return SamplingOptions(**options)
    if options:
        raise TypeError(f"give sampling_params or options, not both: {', '.join(options)}")
    return given


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _is_conversation(prompt: Prompt | Conversation) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _words(words: str | Sequence[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _check(delta: TextDelta) -> TextDelta:
    if delta.finish_reason == "error":
        raise GenerationFailed(delta.error or "the engine gave no reason")
    return delta


def _of_beam(best: Completion, beam: TextBeam, log_probs: bool) -> Completion:
    reason = beam.finish_reason if best.finish_reason in ("stop", "length") else best.finish_reason
    return replace(best, text=beam.text, tokens=beam.tokens, finish_reason=reason,
                   log_probs=beam.log_probs if log_probs else None, total_log_prob=beam.total_log_prob)


def _joined(lists: Sequence[list[Any] | None]) -> list[Any] | None:
    given = [items for items in lists if items is not None]
    return [item for items in given for item in items] if given else None
