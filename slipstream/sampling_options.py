"""How an answer is written, as callers of `slipstream.LLM` say it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.engine.constraints.guided import KINDS
from slipstream.engine.request import Guide, SamplingParams
from slipstream.request_fields.field import Range
from slipstream.request_fields.table import FIELDS, number_range
from slipstream.server.engine_link.engine import AdapterUse, TextRequest
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.weights.home import expanded

Prompt = str | Sequence[int]

# `early_stopping` is checked by its type alone, which is not a number here.
_BOUNDS: Mapping[str, Range] = {
    field.llm: field.bound
    for field in FIELDS.values()
    if field.llm
    and isinstance(field.bound, Range)
    and field.copied
    and field.llm != "early_stopping"
} | {"n": number_range("num_return_sequences")}


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer is written. The defaults are greedy: the most likely token each time.

    A `temperature` over 0 samples, from the `top_k` most likely tokens (0: all), from the most
    likely ones that together reach `top_p`, and from those at least `min_p` times as likely as the
    first. The same `seed` gives the same answer; without one each answer draws its own.

    `stop` ends the text before any of these words; `bad_words` never come. `end_ids` replace the
    model's own end-of-text tokens, `ignore_end` goes on past them, and `min_tokens` holds them off.
    `repetition_penalty` looks at prompt and answer, the other two at the answer only. `logit_bias`
    is added to the logits of tokens. `no_repeat_ngram` forbids a run of that many tokens to come
    twice. `top_p` may shrink by `top_p_decay` with each token, down to `top_p_min`, and begin anew
    after the token `top_p_reset_id`.

    `log_probs` and `top_log_probs` ask for the log-probability of each token and of the likeliest
    n, `prompt_log_probs` for that of each prompt token but the first; `context_logits` and
    `generation_logits` for the logits at each token of the prompt and of the answer.

    `guide_type` makes the answer obey `guide`: json (any object), json_schema, regex, ebnf_grammar,
    structural_tag, or choice (a list of texts). A schema or list may be given as such or as JSON
    text. Needs `slipstream[guided]`.

    `n` answers are drawn from the one prompt. A `beam_width` over 1 searches instead: its `n` best
    beams (all, where `n` is 1) are ranked by log-probability / length ** `length_penalty`;
    `early_stopping` ends the search when `beam_width` beams have ended (True), when a better one is
    not likely (False) or not possible ("never").

    Requests of different `cache_salt` share nothing in the KV cache: one for each tenant keeps them
    apart.

    `adapter` is the folder of a LoRA adapter, as peft or `slipstream lora` writes it. Answers with
    different adapters and with none are computed together.
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
            rule = bound.problem(value) if value is not None else ""
            if rule:
                raise ValueError(f"{name} {rule}, got {value}")
        if self.guide_type not in ("", *KINDS) or (self.guide and not self.guide_type):
            raise ValueError(
                f"guide_type must be one of {', '.join(KINDS)}, got {self.guide_type!r}"
            )

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


def _words(words: str | Sequence[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _adapter(folder: str | Path | None) -> AdapterUse | None:
    if folder is None:
        return None
    path = expanded(folder, "adapter")
    if not path.is_dir():
        raise ValueError(f"adapter must be the folder of an adapter, got '{folder}'")
    return AdapterRegistry().from_folder(path, f"adapter '{path.name}'")
