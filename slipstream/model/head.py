"""The output layer of a transformer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import linear_dispatch
from slipstream.kernels.inputs import Input, plain
from slipstream.kernels.linear import Linear
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.linear import Tensors
from slipstream.model.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.kernels.gpu.linear import Fp32OutputLinear, InvariantFp32OutputLinear

_RECOMPUTED_LOGITS = 32  # tokens whose logits are recomputed; more than can tie at the top


class Head:
    """The output layer: from the normalised residual stream to logits [samples, vocab].

    A rank has the rows of its part of the vocabulary, and joins its logits with the others'.
    """

    def __init__(
        self, spec: ModelSpec, source: Tensors, embedding: Tensor, ranks: Ranks = ALONE
    ) -> None:
        self._ranks = ranks
        self._vocab_size = spec.vocab_size
        self._each = len(spec.vocabulary_of(0, ranks.size))
        own_tokens = spec.vocabulary_of(ranks.rank, ranks.size)
        self._first = own_tokens.start
        rows = len(own_tokens)
        if ranks.size > 1:
            embedding = embedding[own_tokens.start : own_tokens.stop]
        self.softcap = spec.final_softcap
        self.scale = spec.logit_scale
        self._batch_invariant = source.batch_invariant
        self.bias: Tensor | None = None
        if spec.head_bias:
            self.bias = source.take("lm_head.bias", (rows,)).float()
        # unquantised [vocab, embedding]; None if the head is quantised
        self.weight: Tensor | None = embedding
        if not spec.tied_embeddings:
            self.weight = source.peek("lm_head.weight", (rows, spec.embedding_width))
        # a quantised engine holds a head of its own even if the embeddings are tied
        own = source.has("lm_head.weight")
        # the layer with float32 output, if the device has one
        self.fp32_linear: Fp32OutputLinear | InvariantFp32OutputLinear | None = None
        if self.weight is not None and not (spec.tied_embeddings and own):
            self.fp32_linear = linear_dispatch.fp32_output(self.weight, source.batch_invariant)
        self.linear: Linear
        if self.fp32_linear is not None:
            source.discard("lm_head.weight")
            self.linear = self.fp32_linear
        elif spec.tied_embeddings and not own:
            self.linear = source.in_form(linear_dispatch.unquantised(embedding, None))
        else:
            self.linear = source.linear("lm_head", rows, spec.embedding_width, False)

    def __call__(self, x: Input, out: Tensor | None = None) -> Tensor:
        """out: memory for the logits, used if the device can write to it"""
        if self._ranks.size == 1:
            return self._own_logits(x, out)
        return self._ranks.join(self._own_logits(x, None), self._each, self._vocab_size, out)

    def best_tokens(self, x: Input) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each sample and its token, the lowest of equals: what an
        argmax of all logits gives. Ranks exchange one logit each, and no part of the vocabulary.
        """
        return self._ranks.likeliest(self._own_logits(x, None), self._first)

    def _own_logits(self, x: Input, out: Tensor | None) -> Tensor:
        """Return the logits of this rank's part of the vocabulary: [samples, part]."""
        logits = self.linear(x) if self.fp32_linear is None else self.fp32_linear(x, out)
        # On a GPU, 16-bit logits are converted where they are sampled, without a pass of their own.
        if logits.device.type == "cpu":
            x = plain(x)
            logits = logits.float()
            if x.dtype != torch.float32 and self.weight is not None and len(x):
                logits = recompute_top_logits(logits, x, self.weight, self._batch_invariant)
        if self.bias is not None:
            # In place if the type allows: otherwise each captured graph keeps its logits twice.
            logits = logits.add_(self.bias) if logits.dtype == torch.float32 else logits + self.bias
        if self.scale != 1.0:
            logits = (
                logits.mul_(self.scale) if logits.dtype == torch.float32 else logits * self.scale
            )
        if not self.softcap:
            return logits
        return logits.float().div_(self.softcap).tanh_().mul_(self.softcap)


def score_layer(spec: ModelSpec, source: Tensors) -> Callable[[Tensor], Tensor] | None:
    """Return the output layer of a classifier: [hidden] float32 → [labels]."""
    if not spec.labels:
        return None
    weight = source.take("score.weight", (spec.labels, spec.hidden_size), torch.float32)
    if not spec.score_dense:
        return partial(functional.linear, weight=weight)
    bias = source.take("score.bias", (spec.labels,), torch.float32)
    shape = (spec.hidden_size, spec.hidden_size)
    dense = source.take("score_dense.weight", shape, torch.float32)
    dense_bias = source.take("score_dense.bias", (spec.hidden_size,), torch.float32)

    def score(state: Tensor) -> Tensor:
        middle = torch.tanh(functional.linear(state, dense, dense_bias))
        return functional.linear(middle, weight, bias)

    return score


def recompute_top_logits(
    logits: Tensor, x: Tensor, weight: Tensor, batch_invariant: bool
) -> Tensor:
    """Recompute the largest logits in float32, in place: logits [samples, vocab], x [samples,
    hidden], weight [vocab, hidden].

    A 16-bit logit near 16 is a multiple of 1/16, so that the best tokens tie or trade places. Only
    a few tokens matter, and reading their rows of the weight again costs next to nothing.
    """
    best = logits.topk(min(_RECOMPUTED_LOGITS, logits.shape[-1]), dim=-1).indices  # [samples, n]
    matrices = weight[best].float()
    states = x.float()
    if batch_invariant:  # one call for each sample: its shape does not depend on their number
        pairs = zip(matrices, states, strict=True)
        exact = torch.stack([matrix @ state for matrix, state in pairs])
    else:
        exact = torch.bmm(matrices, states[:, :, None])[:, :, 0]
    return logits.scatter_(1, best, exact)
