"""Text generation in this process, without a server.

    from slipstream import LLM

    with LLM("smollm2-135m") as llm:
        for completion in llm.generate(["The capital of France is", "2 + 2 ="], max_tokens=16):
            print(completion.text, completion.finish_reason)
        print(llm.chat([{"role": "user", "content": "Hello!"}], temperature=0.7).text)

In a coroutine: `async for piece in llm.stream("Once upon a time"): ...`
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from slipstream.engine.messages import Scores
from slipstream.engine.options import read_options
from slipstream.engine.sampling_params import EMBEDDING_KINDS, SamplingParams
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.llm_options import Prompt, SamplingOptions
from slipstream.repository.collection import remove_former_engines
from slipstream.server.engine_link.engine import TextBeam, TextOutput, TextRequest
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.text.chat import Message
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.cache.engines import cached_engine
from slipstream.weights.engine_config import (
    EngineFolderError,
    find_engine_folder,
    read_engine_config,
)
from slipstream.weights.home import expand_home

__all__ = ["LLM", "Completion", "GenerationFailed", "SamplingOptions", "engine_folder"]

Conversation = Sequence[Message]
Logits = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float32]
Result = TypeVar("Result")


class GenerationFailed(RuntimeError):
    """The engine failed a request. The message is its reason."""


@dataclass(frozen=True)
class Completion:
    """The generated text of one prompt. What was not requested is None."""

    text: str
    tokens: list[int]
    finish_reason: str  # stop, length, cancelled or timeout
    prompt_tokens: int  # number of prompt tokens
    cached_tokens: int  # number of prompt tokens found in the KV cache
    log_probs: list[float] | None = None  # log-probability of each token
    top_log_probs: list[list[tuple[int, float]]] | None = None  # most likely tokens at each token
    prompt_log_probs: list[float] | None = None  # log-probability of each prompt token but one
    context_logits: Logits | None = None  # float32 [prompt tokens, vocab]
    generation_logits: Logits | None = None  # float32 [tokens, vocab]
    total_log_prob: float | None = None  # log-probability of a beam, including its end token
    # further completions of the same prompt; with beam search, the best first
    others: tuple[Completion, ...] = ()


class LLM:
    """An engine in this process, with its tokenizer.

    `model` is an engine folder, a Hugging Face folder, a GGUF file, a hub id such as
    "Qwen/Qwen2.5-0.5B", or a known name such as "smollm2-135m". Unless it is an engine folder, its
    engine comes from the cache that all commands share. It is built if the cache does not have it.

    `dtype` is the type that the engine computes in and that a new build stores: auto, float32,
    bfloat16 or float16. `weight_only` or `quantization` ("int8", "fp8" or "int4") quantises the
    weights of a new build.

    `settings` have the names of the flags of `slipstream start`: max_batch_size (or max_num_seqs),
    max_seq_len (max_model_len), max_num_tokens (max_num_batched_tokens), kv_cache_memory_bytes,
    kv_cache_free_gpu_mem_fraction or gpu_memory_utilization, kv_cache_dtype, enable_prefix_caching,
    enable_chunked_prefill and scheduler_policy. The fields of `EngineSettings` are accepted, too:
    max_rows, cache_tokens, reuse, threads and so on.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str = "auto",
        *,
        weight_only: str | None = None,
        quantization: str | None = None,
        **settings: Any,
    ) -> None:
        engine_settings = EngineSettings(dtype=dtype, **read_options(settings))
        if engine_settings.replicas > 1 or engine_settings.devices:
            raise ValueError(
                "replicas and devices are settings of servers: an LLM is one engine, on the first "
                "GPU of CUDA_VISIBLE_DEVICES; use slipstream start --replicas N"
            )
        if weight_only is not None and quantization is not None:
            raise ValueError("weight_only and quantization are the same setting: give one of them")
        self.folder = engine_folder(model, dtype, weight_only or quantization)
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
        """Return the completions of one or more prompts, in their order.

        A prompt is a text or a list of token ids. `options` are the fields of `SamplingOptions`:
        max_tokens, temperature, top_k, top_p, seed, stop and so on.
        """
        chosen = _select_options(sampling_params, options)
        requests = [chosen.request(prompt) for prompt in _list_prompts(prompts)]
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
        """Return the assistant's answer to a conversation."""
        chosen = _select_options(sampling_params, options)

        async def answer() -> Completion:
            prompt = await self._generator.chat_prompt(
                messages, tools=tools, variables=template_variables
            )
            return await self._complete(chosen.request(prompt))

        return self._caller.run(answer())

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "",
        *,
        adapter: str | Path | None = None,
    ) -> Vectors:
        """Return the embeddings of one or more prompts, in their order: float32 [prompts, size].

        A prompt is a text or a list of token ids. `pooling` is last, mean, weightedmean or cls.
        The default is the model's own, for models that declare one. Embeddings have unit length
        unless the model declares otherwise.
        """
        declared = read_engine_config(self.folder).pooling
        kind = pooling or (declared.kind if declared is not None else "")
        if kind not in EMBEDDING_KINDS:
            reason = "" if pooling else ": the model declares none"
            raise ValueError(f"pooling must be one of {', '.join(EMBEDDING_KINDS)}{reason}")
        options = SamplingOptions(max_tokens=1, ignore_end=True, adapter=adapter)
        requests = []
        for prompt in _list_prompts(prompts):
            request = options.request(self._pooled_prompt(prompt))
            sampling = replace(request.sampling, pooling=kind)
            requests.append(replace(request, sampling=sampling))
        vectors: Vectors = np.stack(self._caller.run(self._run_all(requests, self._pool)))
        if declared is None or declared.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
        return vectors

    def _pooled_prompt(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, with the special tokens of embeddings around a text."""
        if not isinstance(prompt, str):
            return list(prompt)
        before, after = self.tokenizer.affixes
        return [*before, *self.tokenizer.encode(prompt, False), *after]

    async def _pool(self, request: TextRequest) -> Vectors:
        async with aclosing(self._generator.generate(request)) as stream:
            deltas = [_check(delta) async for delta in stream]
        scores = Scores()
        for delta in deltas:
            scores.merge(delta.scores or Scores())
        return np.frombuffer(scores.pooled, dtype=np.float32)

    async def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingOptions | None = None,
        **options: Any,
    ) -> AsyncGenerator[str, None]:
        """Yield the pieces of one completion. Leaving the loop early cancels the request."""
        chosen = _select_options(sampling_params, options)
        if chosen.n > 1:
            raise ValueError(f"a stream has one completion: n must be 1, got {chosen.n}")
        if _is_conversation(prompt):
            prompt = await self._generator.chat_prompt(cast(Conversation, prompt))
        async with aclosing(
            self._generator.generate(chosen.request(cast(Prompt, prompt)))
        ) as deltas:
            async for delta in deltas:
                _check(delta)
                if delta.text:
                    yield delta.text

    def close(self) -> None:
        """Stop the engine and free its memory. Running requests fail."""
        self._engine.close()
        self._caller.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    async def _complete_all(self, requests: list[TextRequest]) -> list[Completion]:
        return await self._run_all(requests, self._complete)

    async def _run_all(
        self,
        requests: list[TextRequest],
        run: Callable[[TextRequest], Coroutine[Any, Any, Result]],
    ) -> list[Result]:
        """Return the results of all requests, which run at the same time."""
        tasks = [asyncio.ensure_future(run(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # One request failed or the caller was interrupted: cancel the others.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, request: TextRequest) -> Completion:
        async with aclosing(self._generator.generate(request)) as stream:
            deltas = [_check(delta) async for delta in stream]
        completions = []
        for sequence in range(request.sequences):
            own = [delta for delta in deltas if delta.sequence == sequence]
            if own:
                completions.append(self._completion(request, own))
        if deltas[-1].beams:
            log_probs = request.sampling.log_probs
            best = completions[0]
            completions = [_beam_completion(best, beam, log_probs) for beam in deltas[-1].beams]
        first, *rest = completions
        others = []
        # Only the first sequence has the scores of the prompt, which all share.
        prompt_log_probs = first.prompt_log_probs
        logits = first.context_logits
        for other in rest:
            others.append(replace(other, prompt_log_probs=prompt_log_probs, context_logits=logits))
        return replace(first, others=tuple(others))

    def _completion(self, request: TextRequest, deltas: Sequence[TextOutput]) -> Completion:
        return Completion(
            text="".join(delta.text for delta in deltas),
            tokens=list(chain.from_iterable(delta.tokens for delta in deltas)),
            finish_reason=deltas[-1].finish_reason,
            prompt_tokens=deltas[-1].prompt_tokens,
            cached_tokens=max(delta.cached_tokens for delta in deltas),
            log_probs=_concatenate([delta.log_probs for delta in deltas]),
            top_log_probs=_concatenate([delta.top_log_probs for delta in deltas]),
            **self._scores(request.sampling, deltas),
        )

    def _scores(self, sampling: SamplingParams, deltas: Sequence[TextOutput]) -> dict[str, Any]:
        """Return the requested scores, by the names of Completion."""
        scores = Scores()
        for delta in deltas:
            scores.merge(delta.scores or Scores())
        width = self._engine.info.vocab_size if self._engine.info is not None else 1
        requested: dict[str, Any] = {}
        if sampling.prompt_log_probs:
            requested["prompt_log_probs"] = scores.prompt_log_probs
        for name in ("context_logits", "generation_logits"):
            if getattr(sampling, name):
                logits = np.frombuffer(getattr(scores, name), dtype=np.float32)
                requested[name] = logits.reshape(-1, width)
        return requested


class _EventLoopThread:
    """An event loop in a thread, for callers without one or inside their own."""

    def __init__(self) -> None:
        self._event_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._event_loop.run_forever, name="llm", daemon=True
        )
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
    """Return the engine folder of a model. Builds the engine if there is none."""
    path = expand_home(model)
    if path.is_dir() and _is_engine(path):
        if weight_only is not None:
            raise ValueError(f"{path} is already built: weight_only applies to new builds only")
        return read_engine_config(path).path
    engine = cached_engine(str(model), dtype, weight_only)
    remove_former_engines(engine)
    return engine


def _is_engine(path: Path) -> bool:
    """Return whether the folder is an engine of any release. Reading it finds what is wrong."""
    try:
        config = json.loads((find_engine_folder(path) / "config.json").read_text(encoding="utf-8"))
    except (EngineFolderError, OSError, ValueError):
        return False  # building from it reports what is missing
    return isinstance(config, dict) and "pretrained_config" in config


def _select_options(given: SamplingOptions | None, options: dict[str, Any]) -> SamplingOptions:
    if given is None:
        return SamplingOptions(**options)
    if options:
        raise TypeError(f"give sampling_params or options, not both: {', '.join(options)}")
    return given


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _is_conversation(prompt: Prompt | Conversation) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _check(delta: TextOutput) -> TextOutput:
    if delta.finish_reason == "error":
        raise GenerationFailed(delta.error or "the engine gave no reason")
    return delta


def _beam_completion(best: Completion, beam: TextBeam, log_probs: bool) -> Completion:
    reason = beam.finish_reason if best.finish_reason in ("stop", "length") else best.finish_reason
    return replace(
        best,
        text=beam.text,
        tokens=beam.tokens,
        finish_reason=reason,
        log_probs=beam.log_probs if log_probs else None,
        total_log_prob=beam.total_log_prob,
    )


def _concatenate(lists: Sequence[list[Any] | None]) -> list[Any] | None:
    """Return the lists as one. None: there is no list."""
    given = [items for items in lists if items is not None]
    return list(chain.from_iterable(given)) if given else None
