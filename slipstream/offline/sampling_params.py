"""The parameters of `slipstream.LLM` for generating text."""

from __future__ import annotations

import dataclasses
import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from slipstream.engine.sampling_params import BaseSamplingParams, Guide
from slipstream.engine.sampling_params import SamplingParams as EngineParams
from slipstream.offline.guides import (
    GuideForm,
    StructuredOutputsParams,
    read_guide,
    read_structured_outputs,
)
from slipstream.request_fields.field import LARGEST_INT, PYTHON_TYPES, Field, Range
from slipstream.request_fields.table import FIELDS
from slipstream.server.engine_link.engine import AdapterUse, TextRequest
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.weights.home import expand_home

Prompt = str | Sequence[int]

# Parameters that are numbers. `early_stopping` is not one here.
_NUMBERS: Mapping[str, Field] = {
    field.llm: field
    for field in FIELDS.values()
    if field.llm
    and isinstance(field.bound, Range)
    and (field.copied_unchanged or field.llm == "n")
    and field.llm != "early_stopping"
}
# vLLM's names of parameters that have another name, and their fields in the table
_OTHER_NAMES = {"logprobs": "top_log_probs", "prompt_logprobs": "top_log_probs"}
# pairs of parameters that set the same thing
_SAME = (
    ("logprobs", "log_probs"),
    ("logprobs", "top_log_probs"),
    ("prompt_logprobs", "prompt_log_probs"),
    ("structured_outputs", "guide"),
    ("structured_outputs", "guide_type"),
)


@dataclass(frozen=True)
class SamplingParams(BaseSamplingParams):
    """The parameters for generating text. Greedy by default. vLLM's names have vLLM's meaning.

    A `temperature` above 0 turns sampling on. `top_k`, `top_p`, `min_p` and the other parameters
    that narrow the choice then apply. The same `seed` gives the same completion; without one, each
    completion has its own.

    `max_tokens` None means as many as the engine's length allows. `stop`: texts that end the
    completion and are not part of it, unless `include_stop_str_in_output` is set. `bad_words`:
    texts that are never generated. `stop_token_ids` end the completion besides the model's end
    tokens, `end_ids` in their place; `ignore_eos` (or `ignore_end`) ignores these. No end token is
    generated before `min_tokens` tokens. `logit_bias` is added to the logits of tokens.
    `allowed_token_ids` excludes all other tokens.

    `logprobs` returns the log-probability of each token and of this many likeliest ones,
    `prompt_logprobs` the same for each prompt token except the first. `log_probs` with
    `top_log_probs`, and `prompt_log_probs`, are the same in the form of flags. `context_logits` and
    `generation_logits` return the logits of each prompt token and of each generated token.

    `guide` is what the completion must match: a pydantic class, a JSON schema (a dict or its JSON
    text), or a list of texts to choose from. `guide_type` names the kind of any other grammar:
    json (any object), json_schema, regex, ebnf_grammar, structural_tag or choice.
    `structured_outputs` is the same in vLLM's form. Needs `slipstream[guided]`.

    `n` is the number of completions of each prompt. A `beam_width` above 1 runs a beam search
    instead, which returns its `n` best beams (all of them if `n` is 1). Beams are ranked by
    log-probability / length ** `length_penalty`. `early_stopping` ends the search when `beam_width`
    beams have ended (True), when a better one is unlikely (False) or impossible ("never").

    Requests with different `cache_salt` share no cached blocks.

    `adapter` is the folder of a LoRA adapter, in the format of peft or `slipstream lora`.
    """

    n: int = 1
    max_tokens: int | None = 128
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    bad_words: str | Sequence[str] = ()
    end_ids: Sequence[int] = ()
    ignore_eos: bool = False
    ignore_end: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: GuideForm = ""
    guide_type: str = ""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    early_stopping: bool | Literal["never"] = True
    cache_salt: str = ""
    adapter: str | Path | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.top_k == -1:  # means "off" on other servers
            object.__setattr__(self, "top_k", 0)
        for first, second in _SAME:
            if self._is_given(first) and self._is_given(second):
                raise ValueError(f"{first} and {second} are the same setting: give one of them")
        for name, known in _NUMBERS.items():
            _check_number(name, getattr(self, name), known)
        for name, other in _OTHER_NAMES.items():
            _check_number(name, getattr(self, name), FIELDS[other])
        self._read_guide()

    def _is_given(self, name: str) -> bool:
        default = type(self).__dataclass_fields__[name].default
        return bool(getattr(self, name) != default)

    def sampling(self) -> EngineParams:
        """Return the parameters as the engine has them."""
        shared = {
            parameter.name: getattr(self, parameter.name)
            for parameter in dataclasses.fields(BaseSamplingParams)
        }
        shared["log_probs"] = self.log_probs or self.logprobs is not None
        shared["top_log_probs"] = self.top_log_probs or self.logprobs or 0
        shared["prompt_log_probs"] = self.prompt_log_probs or self.prompt_logprobs is not None
        return EngineParams(
            **shared,
            max_tokens=LARGEST_INT if self.max_tokens is None else self.max_tokens,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
            end_ids=tuple(self.end_ids),
            logit_bias=tuple(self.logit_bias.items()),
            allowed_tokens=tuple(self.allowed_token_ids),
            guide=self._read_guide(),
            early_stopping=2 if self.early_stopping == "never" else int(self.early_stopping),
            top_prompt_log_probs=self.prompt_logprobs or 0,
            prompt_ranks=self.prompt_logprobs is not None,
        )

    def _read_guide(self) -> Guide | None:
        if self.structured_outputs is not None:
            return read_structured_outputs(self.structured_outputs)
        return read_guide(self.guide, self.guide_type)

    def request(self, prompt: Prompt) -> TextRequest:
        """Return the request for the completions of one prompt."""
        return TextRequest(
            prompt=prompt if isinstance(prompt, str) else list(prompt),
            sampling=self.sampling(),
            bad_words=_list_words(self.bad_words),
            stop_words=_list_words(self.stop),
            show_stop_word=self.include_stop_str_in_output,
            stop_ids=tuple(self.stop_token_ids),
            add_special_tokens=self.add_special_tokens,
            skip_special_tokens=self.skip_special_tokens,
            ignore_end=self.ignore_eos or self.ignore_end,
            sequences=self.n,
            cache_salt=self.cache_salt,
            adapter=_find_adapter(self.adapter),
        )


class SamplingKeywords(TypedDict, total=False):
    """The parameters of `SamplingParams` as keywords of `LLM.generate` and its like."""

    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_min: float
    top_p_reset_id: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    no_repeat_ngram: int
    log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool
    context_logits: bool
    generation_logits: bool
    beam_width: int
    length_penalty: float
    diversity_rate: float
    n: int
    max_tokens: int | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    bad_words: str | Sequence[str]
    end_ids: Sequence[int]
    ignore_eos: bool
    ignore_end: bool
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    logprobs: int | None
    prompt_logprobs: int | None
    guide: GuideForm
    guide_type: str
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None
    early_stopping: bool | Literal["never"]
    cache_salt: str
    adapter: str | Path | None
    add_special_tokens: bool
    skip_special_tokens: bool


def choose_params(given: SamplingParams | None, keywords: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that are given as an object or as keywords."""
    if given is not None and keywords:
        raise TypeError(f"give sampling_params or options, not both: {', '.join(keywords)}")
    if given is not None:
        if not isinstance(given, SamplingParams):
            raise TypeError(
                f"sampling_params must be slipstream.SamplingParams, not {type(given).__name__}"
            )
        return given
    known = [parameter.name for parameter in dataclasses.fields(SamplingParams)]
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            suggestion = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"there is no option {name!r}{suggestion}")
    return SamplingParams(**keywords)


def _check_number(name: str, value: Any, known: Field) -> None:
    """Raise TypeError or ValueError if the value of a number is not one of its field's."""
    if value is None:
        return
    whole = PYTHON_TYPES[known.datatype] is int
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
    assert isinstance(known.bound, Range)
    problem = known.bound.problem(cast(float, value))
    if problem:
        raise ValueError(f"{name} {problem}, got {value}")


def _list_words(words: str | Sequence[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _find_adapter(folder: str | Path | None) -> AdapterUse | None:
    if folder is None:
        return None
    path = expand_home(folder, "adapter")
    if not path.is_dir():
        raise ValueError(f"adapter must be the folder of an adapter, got '{folder}'")
    return AdapterRegistry().from_folder(path, f"adapter '{path.name}'")
