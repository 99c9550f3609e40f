"""Text generation in this process, without a server.

    from slipstream import LLM

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The capital of France is", "2 + 2 ="], max_tokens=16):
            print(output.text, output.finish_reason)
        print(llm.chat([{"role": "user", "content": "Hello!"}], temperature=0.7).text)
        for piece in llm.stream("Once upon a time"):
            print(piece, end="")

In a coroutine: `async for piece in llm.stream("Once upon a time"): ...`
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import numpy as np

from slipstream.engine.options import read_options
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker.process import start_real_engine
from slipstream.offline.engine_keywords import EngineKeywords
from slipstream.offline.event_loop import EventLoopThread, TextStream
from slipstream.offline.generation import GenerationFailed, complete, pool, run_all, stream_pieces
from slipstream.offline.guides import StructuredOutputsParams
from slipstream.offline.model import engine_folder
from slipstream.offline.pooling import Pooling, Vectors, cosines, pair_texts, sigmoids
from slipstream.offline.progress import BatchProgress, LoadProgress
from slipstream.offline.results import Completion, Logprob, RequestOutput
from slipstream.offline.sampling_params import (
    Prompt,
    SamplingKeywords,
    SamplingParams,
    choose_params,
)
from slipstream.offline.serving import LLMServer, served_name, start_options
from slipstream.progress import is_shown
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.text.chat import Message
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import read_engine_config

__all__ = [
    "LLM",
    "Completion",
    "GenerationFailed",
    "Logprob",
    "RequestOutput",
    "SamplingOptions",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextStream",
    "engine_folder",
]

SamplingOptions = SamplingParams  # its former name
Conversation = Sequence[Message]


class TextPrompt(TypedDict):
    """A prompt in vLLM's form: a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt in vLLM's form: token ids."""

    prompt_token_ids: Sequence[int]


AnyPrompt = Prompt | TextPrompt | TokensPrompt


class LLM:
    """An engine in this process, with its tokenizer.

    `model` is an engine folder, a Hugging Face folder, a GGUF file, a hub id such as
    "Qwen/Qwen2.5-0.5B", or a known name such as "smollm2-135m". Unless it is an engine folder, its
    engine comes from the cache that all commands share. It is built if the cache does not have it.

    `dtype` is the type that the engine computes in and that a new build stores: auto, float32,
    bfloat16 or float16. `weight_only` or `quantization` ("int8", "fp8" or "int4") quantises the
    weights of a new build.

    `progress` shows how far fetching, building and loading are, and is the default of batches.
    None: in a terminal or a notebook.

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
        progress: bool | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> None:
        engine_settings = EngineSettings(dtype=dtype, **read_options(settings))
        if engine_settings.replicas > 1 or engine_settings.devices:
            raise ValueError(
                "replicas and devices are settings of servers: an LLM is one engine, on the first "
                "GPU of CUDA_VISIBLE_DEVICES; use slipstream start --replicas N"
            )
        if weight_only is not None and quantization is not None:
            raise ValueError("weight_only and quantization are the same setting: give one of them")
        self._progress = progress
        self._name = str(model)
        began = time.monotonic()
        display = LoadProgress(is_shown(progress))
        self.folder = engine_folder(model, dtype, weight_only or quantization, display)
        display.say(f"Loading {self.folder}")
        self.tokenizer = Tokenizer.load(self.folder)
        self._engine = InProcessEngine(start_real_engine(str(self.folder), engine_settings))
        self._generator = TextGenerator(self.tokenizer, self._engine)
        self._caller = EventLoopThread()
        self._server: LLMServer | None = None
        display.say(f"{self!r} is ready after {time.monotonic() - began:.1f} s")

    def __repr__(self) -> str:
        info = self._engine.info
        if self._engine.failure is not None:
            return f"<LLM {self._name!r}: {self._engine.failure}>"
        if info is None:
            return f"<LLM {self._name!r}>"
        cache = f"{info.total_blocks * info.block_tokens:,} tokens of KV cache"
        length = f"up to {info.max_sequence_tokens:,} tokens a request"
        rows = f"{info.max_rows:,} requests at once"
        return f"<LLM {self._name!r}: {info.dtype} on {info.device}, {length}, {rows}, {cache}>"

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Return the completions of one or more prompts, in their order.

        A prompt is a text or a list of token ids. `options` are the fields of `SamplingParams`:
        max_tokens, temperature, top_k, top_p, seed, stop and so on. A list of parameters has one
        for each prompt. `progress` shows the finished prompts. None: the setting of the LLM, for
        several prompts only.
        """
        self._check_output_layer()
        listed = _list_prompts(prompts)
        chosen = _list_params(sampling_params, options, len(listed), "prompts")
        requests = [one.request(prompt) for one, prompt in zip(chosen, listed, strict=True)]
        return self._caller.run(self._complete_all(requests, progress))

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> RequestOutput | list[RequestOutput]:
        """Return the assistant's answer to a conversation, or a list of answers to several.

        `template_variables` are for the model's chat template. `continue_final_message` has the
        model continue with the last message.
        """
        self._check_output_layer()
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Conversation], [messages] if single else messages)
        chosen = _list_params(sampling_params, options, len(conversations), "conversations")

        async def answer(given: tuple[Conversation, SamplingParams]) -> RequestOutput:
            conversation, params = given
            prompt = await self._generator.chat_prompt(
                conversation,
                tools=tools,
                variables=template_variables,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
            )
            return await complete(self._generator, params.request(prompt))

        inputs = list(zip(conversations, chosen, strict=True))
        bar = self._bar("conversations", len(inputs), progress)
        answers = self._caller.run(run_all(inputs, answer, bar))
        return answers[0] if single else answers

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> TextStream:
        """Return the pieces of one completion, for `for` or `async for`.

        Leaving the loop early cancels the request.
        """
        self._check_output_layer()
        chosen = choose_params(sampling_params, options)
        if chosen.n > 1:
            raise ValueError(f"a stream has one completion: n must be 1, got {chosen.n}")

        async def make_request() -> TextRequest:
            if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
                conversation = cast(Conversation, prompt)
                return chosen.request(await self._generator.chat_prompt(conversation))
            return chosen.request(cast(Prompt, prompt))

        return TextStream(stream_pieces(self._generator, make_request), self._caller)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "",
        *,
        adapter: str | Path | None = None,
        progress: bool | None = None,
    ) -> Vectors:
        """Return the embeddings of one or more prompts, in their order: float32 [prompts, size].

        A prompt is a text or a list of token ids. `pooling` is last, mean, weightedmean or cls.
        The default is the model's own, for models that declare one. Embeddings have unit length
        unless the model declares otherwise.
        """
        pooled = Pooling(read_engine_config(self.folder), self.tokenizer)
        kind = pooled.kind(pooling)
        requests = pooled.requests(_list_prompts(prompts), kind, adapter)
        return pooled.embeddings(self._pool_all(requests, progress))

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        pooling: str = "",
        use_activation: bool = True,
        adapter: str | Path | None = None,
        progress: bool | None = None,
    ) -> list[float]:
        """Return how well each document matches the query, or its own one of as many queries.

        A model with a score layer reads each pair at once. Its scores are between 0 and 1, unless
        `use_activation` is False. For an embedding model the score is the cosine of the two
        embeddings, and `pooling` is as for `embed`.
        """
        queries, texts = pair_texts(query, documents)
        pooled = Pooling(read_engine_config(self.folder), self.tokenizer)
        if pooled.scores_pairs:
            requests = pooled.pair_requests(queries, texts, adapter)
            vectors = self._pool_all(requests, progress)
            if use_activation:
                return sigmoids(vectors)
            return [float(value) for value in vectors[:, 0]]
        unique = list(dict.fromkeys(queries))
        requests = pooled.requests([*unique, *texts], pooled.kind(pooling), adapter)
        vectors = self._pool_all(requests, progress)
        rows = [unique.index(one) for one in queries]
        return cosines(vectors[rows], vectors[len(unique) :])

    @overload
    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        model_name: str | None = None,
        api_key: str | None = None,
        options: Sequence[str] = (),
        exit_timeout: float = 30.0,
        log: bool | None = None,
        background: Literal[False] = False,
    ) -> None: ...
    @overload
    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        model_name: str | None = None,
        api_key: str | None = None,
        options: Sequence[str] = (),
        exit_timeout: float = 30.0,
        log: bool | None = None,
        background: Literal[True],
    ) -> LLMServer: ...
    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        model_name: str | None = None,
        api_key: str | None = None,
        options: Sequence[str] = (),
        exit_timeout: float = 30.0,
        log: bool | None = None,
        background: bool = False,
    ) -> LLMServer | None:
        """Serve this engine over HTTP (Triton's and OpenAI's routes) and gRPC.

        The weights are not loaded again: a server process is linked to this engine, which continues
        with the calls of this process, too. Port 0 is any free port. `model_name` is the name in
        requests (default: the last part of the model's path or id). `options` are further options
        of `slipstream start`, such as "--tool-call-parser=hermes".

        It serves until Ctrl-C or SIGTERM, and running requests then have `exit_timeout` seconds to
        finish. With `background` it returns the running server, which `stop()` or `with` ends.
        `log` shows the server's log (default: unless in the background).
        """
        if self._caller.closed:
            raise RuntimeError("this LLM is closed")
        if self._server is not None and self._server.running:
            raise RuntimeError(f"this LLM is served at {self._server.url}: stop that server first")
        name = served_name(self._name) if model_name is None else model_name
        words = start_options(host, port, grpc_port, metrics_port, options)
        shown = not background if log is None else log

        async def start() -> LLMServer:
            # on the thread of this LLM: the kernel ends the server with the thread that starts it
            return LLMServer(self._engine, self.folder, name, words, api_key, exit_timeout, shown)

        self._server = self._caller.run(start())
        self._server.wait_started()
        if background:
            return self._server
        self._server.wait()
        return None

    def close(self) -> None:
        """Stop the engine and its server, and free its memory. Running requests fail."""
        if self._server is not None and self._server.running:
            self._server.stop()
        self._engine.close()
        self._caller.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _check_output_layer(self) -> None:
        declared = read_engine_config(self.folder).pooling
        if declared is not None and not declared.generates:
            raise ValueError(
                f"{self.folder}: the model has no output layer for tokens; use embed() or score()"
            )

    async def _complete_all(
        self, requests: list[TextRequest], progress: bool | None = None
    ) -> list[RequestOutput]:
        bar = self._bar("prompts", len(requests), progress)
        return await run_all(requests, lambda one: complete(self._generator, one), bar)

    def _pool_all(self, requests: list[TextRequest], progress: bool | None) -> Vectors:
        bar = self._bar("texts", len(requests), progress)
        vectors = self._caller.run(run_all(requests, lambda one: pool(self._generator, one), bar))
        return np.stack(vectors)

    def _bar(self, what: str, count: int, wanted: bool | None) -> BatchProgress:
        """Return the progress of a batch. A single request shows none unless it is wanted."""
        if wanted is None and count > 1:
            wanted = self._progress
        elif wanted is None:
            wanted = False
        return BatchProgress(what, count, is_shown(wanted))


def _list_params(
    given: SamplingParams | Sequence[SamplingParams] | None,
    options: Mapping[str, Any],
    count: int,
    what: str,
) -> list[SamplingParams]:
    """Return the parameters of each prompt or conversation."""
    if given is None or isinstance(given, SamplingParams) or not isinstance(given, Sequence):
        return [choose_params(given, options)] * count
    if len(given) != count:
        raise ValueError(
            f"sampling_params must be one, or as many as {what} ({count}), got {len(given)}"
        )
    return [choose_params(one, options) for one in given]


def _list_prompts(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [_read_prompt(cast(AnyPrompt, prompts))]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [cast(Sequence[int], prompts)]
    return [_read_prompt(prompt) for prompt in cast(Sequence[AnyPrompt], prompts)]


def _read_prompt(prompt: AnyPrompt) -> Prompt:
    """Return a prompt without vLLM's form around it."""
    if not isinstance(prompt, Mapping):
        return prompt
    known = [name for name in ("prompt_token_ids", "prompt") if name in prompt]
    if len(prompt) != 1 or len(known) != 1:
        raise TypeError(
            f"a prompt in a dict has the key prompt or prompt_token_ids, got {sorted(prompt)}"
        )
    return cast(Mapping[str, Prompt], prompt)[known[0]]
