"""The models around the engine, for clients that call them alone: text to ids, and ids to text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from slipstream.repository.models import RepositoryModel
from slipstream.repository.roles import takes_comma_words
from slipstream.request_fields.table import PREPROCESSING_FIELDS
from slipstream.server.fields.prompts import conversation_tokens
from slipstream.server.fields.values import (
    MESSAGES,
    RequestFields,
    check_batch,
    check_prompt,
    check_prompt_length,
    pack_words,
    read_request_fields,
    read_words,
    sampling_params,
)
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, ServedModel
from slipstream.server.kserve.tensors import Array, Tensor
from slipstream.server.models.generating import EngineBackedModel, ServedEngine
from slipstream.server.models.generation_outputs import rename_and_filter
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.threads import in_thread_if_long

PASSED_THROUGH = {
    "CUM_LOG_PROBS": (1, 1),
    "OUTPUT_LOG_PROBS": (1, 1, 1),
    "CONTEXT_LOGITS": (1, 1, 1),
    "GENERATION_LOGITS": (1, 1, 1, 1),
}


_MAX_ROWS = 4096  # rows of token ids that are decoded at once


class PreprocessingModel(EngineBackedModel):
    def __init__(self, model: RepositoryModel, engine: ServedEngine) -> None:
        super().__init__(model.config, engine)
        self._names = {name: name for name in model.config.output_names}
        self._fields = {
            field: name
            for name, field in PREPROCESSING_FIELDS.items()
            if name in model.config.input_names
        }
        self._comma_words = takes_comma_words(model.config)

    def fillers(self, request: InferRequest) -> Mapping[str, int]:
        tokenizer = self.engine.generator.tokenizer
        given = request.inputs.get("PAD_ID")
        pad_id = tokenizer.pad_id if given is None else given.first
        return {"INPUT_ID": _pad(pad_id, tokenizer.eos_id)}

    async def answer(
        self, request: InferRequest, check_queue: bool = True
    ) -> AsyncGenerator[InferResponse, None]:
        if check_queue:
            self.check_queue(request, 1)
        try:
            check_batch(request, self.config)
            fields = read_request_fields(request, PREPROCESSING_FIELDS)
            # the parameters of an ensemble's request may be for another of its steps
            check_prompt(fields, self._fields, {})
            request.times.end_input()
            ids = await self._prompt(fields)
            outputs = self._outputs(fields, ids)
            request.times.end_infer()
            yield InferResponse(rename_and_filter(outputs, self._names))
        except (InferenceError, TokenizerError) as error:
            yield InferResponse(error=InferenceError(str(error)))

    async def _prompt(self, fields: RequestFields) -> list[int]:
        longest = self.engine.model.engine_config.build.max_input_len
        if MESSAGES in fields:
            return await conversation_tokens(fields[MESSAGES], self.engine.generator, longest)
        tokenizer = self.engine.generator.tokenizer
        check_prompt_length(fields["text_input"], longest, tokenizer.surely_exceeds)
        text = fields["text_input"].tensor.text()
        special = self.engine.model.add_special_tokens
        return await in_thread_if_long(len(text), tokenizer.encode, text, special)

    def _outputs(self, fields: RequestFields, ids: list[int]) -> list[Tensor]:
        tokenizer = self.engine.generator.tokenizer
        length = fields.require("max_tokens", "REQUEST_OUTPUT_LEN")
        end_id = fields["end_id"].value if "end_id" in fields else tokenizer.eos_id
        pad_id = fields["pad_id"].value if "pad_id" in fields else tokenizer.pad_id
        return [
            Tensor.from_values("INPUT_ID", "INT32", (1, len(ids)), ids),
            Tensor.from_values("REQUEST_INPUT_LEN", "INT32", (1, 1), [len(ids)]),
            self._word_ids(fields, "bad_words", "BAD_WORDS_IDS"),
            self._word_ids(fields, "stop_words", "STOP_WORDS_IDS"),
            Tensor.from_values(
                "REQUEST_OUTPUT_LEN", length.tensor.datatype, (1, 1), [length.value]
            ),
            self._bias(fields),
            Tensor.from_values("OUT_END_ID", "INT32", (1, 1), [-1 if end_id is None else end_id]),
            Tensor.from_values("OUT_PAD_ID", "INT32", (1, 1), [_pad(pad_id, tokenizer.eos_id)]),
        ]

    def _word_ids(self, fields: RequestFields, field: str, name: str) -> Tensor:
        if field not in fields:
            return Tensor.from_values(name, "INT32", (1, 2, 0), [])
        words = [
            self.engine.generator.tokenizer.encode(word, False)
            for word in read_words(fields, field, self._comma_words)
        ]
        length, data = pack_words(words)
        return Tensor.from_values(name, "INT32", (1, 2, length), data)

    def _bias(self, fields: RequestFields) -> Tensor:
        tokenizer = self.engine.generator.tokenizer
        pairs = sampling_params(fields, lambda word: tokenizer.encode(word, False)).logit_bias
        data = [0.0] * (self.engine.model.engine_config.spec.vocab_size if pairs else 0)
        for token, weight in pairs:
            if token < len(data):  # a tokenizer may have more tokens than the model has outputs
                data[token] = weight
        return Tensor.from_values("EMBEDDING_BIAS", "FP32", (1, len(data)), data)


def _pad(pad_id: int | None, eos_id: int | None) -> int:
    """Upstream pads with the end-of-text token where a tokenizer has no padding token."""
    return next((token for token in (pad_id, eos_id) if token is not None), 0)


class PostprocessingModel(ServedModel):
    def __init__(self, model: RepositoryModel, engine: ServedEngine) -> None:
        self.config = model.config
        self.engine = engine
        self._names = {name: name for name in model.config.output_names}

    @property
    def generates(self) -> bool:
        return True

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            rows = self._rows(request)
            request.times.end_input()
            texts = await in_thread_if_long(sum(map(len, rows)), self._decode_rows, rows)
            request.times.end_infer()
            yield InferResponse(rename_and_filter(_text_outputs(request, texts), self._names))
        except (InferenceError, TokenizerError) as error:
            yield InferResponse(error=InferenceError(str(error)))

    def _decode_rows(self, rows: list[Array]) -> list[bytes]:
        skip = self.engine.model.skip_special_tokens
        decode = self.engine.generator.tokenizer.decode
        return [decode(row.tolist(), skip).encode() for row in rows]

    def _rows(self, request: InferRequest) -> list[Array]:
        """The ids of each beam of each batch item, without padding."""
        tokens = request.inputs.get("TOKENS_BATCH")
        if tokens is None:
            raise InferenceError("TOKENS_BATCH is required")
        width = tokens.shape[-1]
        ids = tokens.array()
        count = len(ids) // width if width else 0
        longest = self.engine.model.engine_config.build.max_seq_len
        if width > longest:
            raise InferenceError(
                f"TOKENS_BATCH has rows of {width} tokens, and this model takes at most {longest}"
            )
        if count > _MAX_ROWS:
            raise InferenceError(f"TOKENS_BATCH has {count} rows, at most {_MAX_ROWS} are taken")
        rows = [ids[row * width : (row + 1) * width] for row in range(count)]
        given = request.inputs.get("SEQUENCE_LENGTH")
        if given is None:
            return rows
        lengths = given.array()[: count + 8].tolist()
        if len(given.data) != count or any(not 0 <= length <= width for length in lengths):
            raise InferenceError(
                f"SEQUENCE_LENGTH must hold {count} numbers from 0 to {width}, got {lengths[:8]}"
            )
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _text_outputs(request: InferRequest, texts: list[bytes]) -> list[Tensor]:
    outputs = [Tensor("OUTPUT", "BYTES", (len(texts),), texts)]
    for name, shape in PASSED_THROUGH.items():
        given = request.inputs.get(name)
        if given is None:
            given = Tensor.from_values(name, "FP32", shape, [0.0])
        outputs.append(Tensor(f"OUT_{name}", "FP32", given.shape, given.data))
    return outputs
