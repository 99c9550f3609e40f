"""The sampling parameters of a request. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

# last: the state of the last token; mean, weightedmean: of all tokens, the latter with weights
# 1, 2, ...; cls: of the first token; score: of the last one, through the model's score layer
EMBEDDING_KINDS = ("last", "mean", "weightedmean", "cls")
POOLING_KINDS = (*EMBEDDING_KINDS, "score")
# Lower temperatures count as 0: logits divided by them could overflow.
MIN_TEMPERATURE = 1e-6
# error of a request whose fields exclude every token: its bad words and its grammar, for example
NO_TOKEN_LEFT = "the request's parameters leave no token to choose"


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar that the whole output must match."""

    kind: str  # json, json_schema, regex, ebnf_grammar, structural_tag, choice or composed
    text: str  # the schema, the expression, …; a JSON list of strings for choice


@dataclass(frozen=True, slots=True)
class BaseSamplingParams:
    """The sampling parameters that requests and `slipstream.LLM` share. The defaults are greedy.

    `temperature` 0 means greedy, whatever the other fields say. `top_k` 0, `top_p` 1 and `min_p` 0
    mean off. The repetition penalty applies to tokens of the prompt and the output, the presence
    and frequency penalties to tokens of the output only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 1.0  # factor on top_p after each output token
    top_p_min: float = 1e-6  # lower bound of the decayed top_p
    top_p_reset_id: int = -1  # token that resets the decay; -1: none
    min_p: float = 0.0
    typical_p: float = 1.0  # probability of the locally typical tokens to sample from; 1: off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # end ids are excluded before this many output tokens
    # length of token sequences that may not occur twice, prompt included; 0: off
    no_repeat_ngram: int = 0
    log_probs: bool = False  # report the log-probability of each sampled token
    top_log_probs: int = 0  # number of likeliest tokens to report for each sampled token
    prompt_log_probs: bool = False  # report the log-probability of every prompt token but the first
    context_logits: bool = False  # report the logits at every position of the prompt
    # report the logits that each token was sampled from, before any parameter changed them
    generation_logits: bool = False
    beam_width: int = 1  # over 1: beam search, whose beams are sent when the request ends
    length_penalty: float = 0.0  # a beam's score is its log-probability / length ** length_penalty
    diversity_rate: float = 0.0  # times a beam's index, added to its score when beams are selected


@dataclass(frozen=True, slots=True)
class SamplingParams(BaseSamplingParams):
    """The sampling parameters of a request."""

    max_tokens: int = 16
    seed: int = 0  # 64 bits; the caller draws one when the user gave none
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not occur
    # texts that the output may not contain, however they are tokenised
    bad_texts: tuple[str, ...] = ()
    # texts that end a beam; for other requests the caller looks for stop words in the text
    stop_texts: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, value added to its logit)
    allowed_tokens: tuple[int, ...] = ()  # tokens that may be sampled, end ids included; (): all
    guide: Guide | None = None
    # when a beam search ends. 1: at `beam_width` finished beams; 0: when a better one is unlikely;
    # otherwise: when none can be better
    early_stopping: int = 1
    timing: bool = False  # report timestamps when the request ends
    # number of likeliest tokens to report for every prompt token but the first
    top_prompt_log_probs: int = 0
    # report how many tokens are at least as likely as each prompt token but the first
    prompt_ranks: bool = False
    include_end: bool = False  # the output includes the end token
    # one of POOLING_KINDS: report one vector of the prompt's final hidden states, and no tokens
    pooling: str = ""

    @property
    def beams(self) -> bool:
        """Return whether the request is a beam search."""
        return self.beam_width > 1

    @property
    def candidates(self) -> int:
        """The number of continuations considered per beam: enough even if the best ones all end."""
        return self.beam_width * max(2, 1 + len(self.end_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Return whether sampling is an argmax of the model's own logits, and only tokens are
        reported.
        """
        changes_logits = (
            self.penalised
            or self.bad_words
            or self.logit_bias
            or self.allowed_tokens
            or self.min_tokens
            or self.no_repeat_ngram
            or self.constrained
        )
        return self.greedy and not self.beams and not changes_logits and not self.scores_output

    @property
    def narrows(self) -> bool:
        """Return whether top-k or top-p restricts the tokens that a draw considers."""
        return self.top_k > 0 or self.top_p < 1.0 or self.top_p_decay < 1.0

    @property
    def constrained(self) -> bool:
        """Return whether the allowed tokens depend on the text so far, so that the host must know a
        token before the next one is sampled.
        """
        return self.guide is not None or bool(self.bad_texts or self.stop_texts)

    @property
    def revisable(self) -> bool:
        """Return whether the host may replace output tokens by others of the same text, and append
        tokens that must follow: no token may be banned.
        """
        bans_tokens = self.bad_words or self.no_repeat_ngram or self.logit_bias
        return not (self.beams or bans_tokens)

    @property
    def scores_output(self) -> bool:
        """Return whether scores of each output token are reported."""
        return self.log_probs or self.top_log_probs > 0 or self.generation_logits

    @property
    def scores_prompt(self) -> bool:
        """Return whether logits are needed at every position of the prompt, cached or not."""
        return self.prompt_log_probs or self.context_logits

    @property
    def pools_every_token(self) -> bool:
        """Return whether pooling uses the state at every position of the prompt, not only at the
        last.
        """
        return self.pooling not in ("", "last", "score")

    @property
    def uses_whole_prompt(self) -> bool:
        """Return whether all prompt positions are computed, even those whose blocks are cached."""
        return self.scores_prompt or self.pools_every_token

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
