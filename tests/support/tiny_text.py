"""A repository with a byte-level tokenizer and an engine that repeats its prompt, no weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers

from slipstream.engine.messages import EngineInfo, EngineStats
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.model.spec import ModelSpec
from slipstream.repository.models import Repository
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.engine import EngineUnavailable
from slipstream.server.engine_link.mailbox import RequestOutput
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.build import build_registry
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.engine_config import BuildLimits, GenerationDefaults, config_document
from slipstream.weights.parameters import Quantisation

VOCABULARY = 258  # 256 bytes, <s> and </s>
BEGIN = 256
END = 257
MAX_TOKENS = 4096


def write_engine_folder(folder: Path, max_batch_size: int = 64) -> Path:
    """Write an engine folder with a tokenizer and no weights, for tests without a real engine."""
    folder.mkdir(parents=True)
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        layers=1,
        hidden_size=8,
        heads=2,
        kv_heads=2,
        head_size=4,
        ffn_size=8,
        vocab_size=VOCABULARY,
        max_positions=MAX_TOKENS,
    )
    limits = BuildLimits(MAX_TOKENS - 1, MAX_TOKENS, max_batch_size)
    generation = GenerationDefaults((END,), BEGIN, END)
    own = {"content_hash": "0" * 64, "files": {}}
    document = config_document("0", spec, "float32", Quantisation(), limits, generation, own)
    (folder / "config.json").write_text(json.dumps(document))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = TokenizerFile(
        models.BPE({letter: position for position, letter in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def write_recorded_repository(folder: Path, engine: Path) -> Path:
    """Write the recorded models: those of an import, without the inputs they did not have."""
    absent = (
        '"messages"',
        'name: "exclude_input_in_output"',
        'key: "exclude_input_in_output" value:',
    )
    for model in write_repository(folder, "tensorrt_llm_bls", engine, engine, 64):
        config = model / "config.pbtxt"
        lines = config.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not any(name in line.lower() for name in absent)]
        config.write_text("".join(kept))
    return folder


class EchoedRequest:
    def __init__(
        self, engine: EchoEngine, request_id: int, tokens: list[int], sampling: SamplingParams
    ) -> None:
        self.request_id = request_id
        self._engine = engine
        self._sampling = sampling
        self._tokens = tokens
        self._given = 0
        self._finished = False
        self._cancelled = ""
        self._reason = "length"
        if engine.stops_at_end_ids and sampling.end_ids[0] in tokens:
            self._tokens = tokens[: tokens.index(sampling.end_ids[0]) + 1]
            self._reason = "stop"
        self._wake = asyncio.Event()

    def cancel(self, reason: str = "cancelled") -> None:
        if not self._finished:
            self._cancelled = self._cancelled or reason
            self._engine.cancels.append((self.request_id, reason))
            self._wake.set()

    def __aiter__(self) -> EchoedRequest:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        if self._engine.delay:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._engine.delay)
        while (
            self._engine.hold_end and self._given == len(self._tokens) - 1 and not self._cancelled
        ):
            await asyncio.sleep(0.001)
        if self._cancelled or self._engine.failure:
            self._finished = True
            reason = "error" if self._engine.failure else self._cancelled
            return RequestOutput(finish_reason=reason, error=self._engine.failure)
        token = self._tokens[self._given]
        self._given += 1
        self._finished = self._given == len(self._tokens)
        log_probs = [-0.5] if self._sampling.log_probs else None
        return RequestOutput(
            [token], log_probs, finish_reason=self._reason if self._finished else ""
        )


class EchoEngine:
    """Repeats the prompt (without <s>) for max_tokens tokens, one per step, and records requests."""

    def __init__(self, delay: float = 0.0) -> None:
        self.info: EngineInfo | None = EngineInfo(
            vocab_size=VOCABULARY,
            max_sequence_tokens=MAX_TOKENS,
            max_rows=8,
            total_blocks=8,
            block_tokens=32,
            device="cpu",
            dtype="float32",
            weight_bytes=0,
            cache_bytes=0,
            load_seconds=0.0,
        )
        self.ready = True
        self.outstanding = 0
        self.stats = EngineStats()
        self.delay = delay
        self.stops_at_end_ids = False
        self.hold_end = False  # the last token is held back until this is False again
        self.unavailable = ""
        self.failure = ""
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.cancels: list[tuple[int, str]] = []

    def submit(self, request: GenerateRequest) -> EchoedRequest:
        if self.unavailable:
            raise EngineUnavailable(self.unavailable)
        self.submitted.append((request.prompt, request.sampling))
        source = [token for token in request.prompt if token != BEGIN] or [ord("x")]
        tokens = list(itertools.islice(itertools.cycle(source), request.sampling.max_tokens))
        return EchoedRequest(self, len(self.submitted), tokens, request.sampling)


def text_registry(repository: Repository, engine: EchoEngine) -> ModelRegistry:
    generators = {
        name: TextGenerator(Tokenizer.load(model.tokenizer_folder), engine)
        for name, model in repository.engines.items()
    }
    return build_registry(repository, generators)
