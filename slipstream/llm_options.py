"""The options of `slipstream.LLM` for generating text."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.engine.constraints.guided import KINDS
from slipstream.engine.sampling_params import BaseSamplingParams, Guide, SamplingParams
from slipstream.request_fields.field import Range
from slipstream.request_fields.table import FIELDS, number_range
from slipstream.server.engine_link.engine import AdapterUse, TextRequest
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.weights.home import expand_home

Prompt = str | Sequence[int]

# Bounds of the options that are numbers. `early_stopping` is not one here.
_BOUNDS: Mapping[str, Range] = {
    field.llm: field.bound
    for field in FIELDS.values()
    if field.llm
    and isinstance(field.bound, Range)
    and field.copied_unchanged
    and field.llm != "early_stopping"
} | {"n": number_range("num_return_sequences")}


@dataclass(frozen=True)
class SamplingOptions(BaseSamplingParams):
    """The options of `slipstream.LLM` for generating text. Greedy by default.

    A `temperature` above 0 turns sampling on. `top_k`, `top_p`, `min_p` and the other parameters
    that narrow the choice then apply. The same `seed` gives the same completion; without one, each
    completion has its own.

    `stop`: texts that end the completion and are not part of it. `bad_words`: texts that are never
    generated. `end_ids` replace the model's end tokens, and `ignore_end` ignores these. No end
    token is generated before `min_tokens` tokens. `logit_bias` is added to the logits of tokens.

    `log_probs` and `top_log_probs` return the log-probability of each token and of the most likely
    ones, `prompt_log_probs` that of each prompt token except the first. `context_logits` and
    `generation_logits` return the logits of each prompt token and of each generated token.

    `guide_type` makes the completion follow `guide`: json (any object), json_schema, regex,
    ebnf_grammar, structural_tag, or choice (a list of texts). A schema or list may be given as such
    or as JSON text. Needs `slipstream[guided]`.

    `n` is the number of completions of each prompt. A `beam_width` above 1 runs a beam search
    instead, which returns its `n` best beams (all of them if `n` is 1). Beams are ranked by
    log-probability / length ** `length_penalty`. `early_stopping` ends the search when `beam_width`
    beams have ended (True), when a better one is unlikely (False) or impossible ("never").

    Requests with different `cache_salt` share no cached blocks.

    `adapter` is the folder of a LoRA adapter, in the format of peft or `slipstream lora`.
    """

    max_tokens: int = 128
    seed: int | None = None
    stop: str | Sequence[str] = ()
    bad_words: str | Sequence[str] = ()
    end_ids: Sequence[int] = ()
    ignore_end: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    guide_type: str = ""
    guide: str | Mapping[str, Any] | Sequence[str] = ""
    n: int = 1
    early_stopping: bool | Literal["never"] = True
    cache_salt: str = ""
    adapter: str | Path | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            problem = bound.problem(value) if value is not None else ""
            if problem:
                raise ValueError(f"{name} {problem}, got {value}")
        if self.guide_type not in ("", *KINDS) or (self.guide and not self.guide_type):
            raise ValueError(
                f"guide_type must be one of {', '.join(KINDS)}, got {self.guide_type!r}"
            )

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of a request."""
        shared = {
            parameter.name: getattr(self, parameter.name)
            for parameter in dataclasses.fields(BaseSamplingParams)
        }
        return SamplingParams(
            **shared,
            max_tokens=self.max_tokens,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
            end_ids=tuple(self.end_ids),
            logit_bias=tuple(self.logit_bias.items()),
            guide=self._guide(),
            early_stopping=2 if self.early_stopping == "never" else int(self.early_stopping),
        )

    def _guide(self) -> Guide | None:
        if not self.guide_type:
            return None
        text = self.guide if isinstance(self.guide, str) else json.dumps(self.guide)
        return Guide(self.guide_type, text)

    def request(self, prompt: Prompt) -> TextRequest:
        """Return the request for the completions of one prompt."""
        return TextRequest(
            prompt=prompt if isinstance(prompt, str) else list(prompt),
            sampling=self.sampling(),
            bad_words=_list_words(self.bad_words),
            stop_words=_list_words(self.stop),
            add_special_tokens=self.add_special_tokens,
            skip_special_tokens=self.skip_special_tokens,
            ignore_end=self.ignore_end,
            sequences=self.n,
            cache_salt=self.cache_salt,
            adapter=_find_adapter(self.adapter),
        )


def _list_words(words: str | Sequence[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _find_adapter(folder: str | Path | None) -> AdapterUse | None:
    if folder is None:
        return None
    path = expand_home(folder, "adapter")
    if not path.is_dir():
        raise ValueError(f"adapter must be the folder of an adapter, got '{folder}'")
    return AdapterRegistry().from_folder(path, f"adapter '{path.name}'")
