"""Draw tokens from logits with torch: seeded noise, and the filters top-k, top-p, min-p and
typical-p. It draws the same tokens as `kernels/sampling.py`, for many rows at once: those that the
kernels of this folder do not serve, and as their reference.

A draw adds Gumbel noise to the scaled logits and takes the largest. The noise of a token is a hash
of (seed, position, token). So a draw never depends on the other rows of the batch, and noise is
needed only for the tokens that the filters keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32_BITS = 0xFFFFFFFF

# Top-p without top-k takes this many tokens first: their probabilities nearly always reach p, and
# sorting the whole vocabulary costs more.
_FIRST_TOKENS = 1024


def gumbel(tokens: Tensor, keys: Tensor) -> Tensor:
    """Return Gumbel noise, float32 [rows, n].

    tokens: int64 [rows, n] or [n]; keys: int64 [rows, 1]
    """
    bits = _mix_32(_mix_32(tokens) ^ keys) >> 8
    # Strictly between 0 and 1. The largest sum rounds up to 2**24, which would be infinite noise.
    uniform = ((bits.float() + 0.5) * 2.0**-24).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log(uniform))


def hash_tokens(vocab: int) -> Tensor:
    """Return the part of a token's noise that no row changes: the hash of its id, int32 [vocab]."""
    hashes = _mix_32(torch.arange(vocab))
    return torch.where(hashes >= 2**31, hashes - 2**32, hashes).to(torch.int32)


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and its token: the first of equals; nan if the row has a
    nan. logits: [rows, vocab]
    """
    best, tokens = logits.max(dim=-1)
    return best, tokens


def draw_from_all(
    logits: Tensor,  # [rows, vocab] float32
    temperature: Tensor,  # [rows, 1], above 0
    min_p: Tensor | None,  # [rows, 1]; None: off for all
    keys: Tensor,  # [rows, 1] int64
    typical_p: Tensor | None = None,  # [rows, 1], 1: off; None: off for all
) -> Tensor:
    """Return tokens [rows], drawn without top-k and top-p."""
    scaled = logits / temperature
    if min_p is not None:
        floor = scaled.max(dim=-1, keepdim=True).values + torch.log(min_p)
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if typical_p is not None:
        scaled = scaled.masked_fill(~keep_typical(scaled, typical_p), float("-inf"))
    tokens = torch.arange(scaled.shape[-1], device=scaled.device)
    return (scaled + gumbel(tokens, keys)).argmax(dim=-1)


def draw_narrowed(
    logits: Tensor,  # [rows, vocab] float32
    temperature: Tensor,  # [rows, 1], above 0
    top_k: Tensor,  # [rows, 1] int64, 0: off
    top_p: Tensor,  # [rows, 1], 1: off
    min_p: Tensor,  # [rows, 1], 0: off
    keys: Tensor,  # [rows, 1] int64
    widest: int,  # the largest top_k, or 0 if a row has top-p without top-k
    typical_p: Tensor | None = None,  # [rows, 1], 1: off; None: off for all
) -> Tensor:
    """Return tokens [rows], drawn after temperature, top-k, top-p within it, and min-p relative to
    the likeliest token.
    """
    scaled = logits / temperature
    vocab = logits.shape[-1]
    by_p_alone = top_k == 0
    total = torch.where(by_p_alone, scaled.logsumexp(dim=-1, keepdim=True), float("nan"))
    # On a GPU, checking whether the first tokens suffice would synchronise: sorting all is faster.
    first = _FIRST_TOKENS if logits.device.type == "cpu" else vocab
    width = min(widest or first, vocab)
    # largest first, with one more, which shows whether the last kept one has equals
    values, tokens = scaled.topk(min(width + 1, vocab), dim=-1)
    kept, reached = _keep(values, top_k, top_p, min_p, total)
    if width < vocab and not widest and not bool((reached | ~by_p_alone).all()):
        values, tokens = scaled.sort(dim=-1, descending=True)
        kept, _ = _keep(values, top_k, top_p, min_p, total)
    if logits.device.type == "cpu":
        _keep_first_of_equals(scaled, values, tokens, kept)
    values = values.masked_fill(~kept, float("-inf"))
    if typical_p is not None:
        values = values.masked_fill(~keep_typical(values, typical_p), float("-inf"))
    scores = values + gumbel(tokens, keys)
    return tokens.gather(-1, scores.argmax(dim=-1, keepdim=True)).flatten()


def keep_typical(
    scaled: Tensor,  # [rows, n] float32 logits, -inf for tokens that are excluded already
    typical_p: Tensor,  # [rows, 1], 1: off
) -> Tensor:
    """Return which tokens locally typical sampling keeps [rows, n].

    These are the fewest tokens whose probabilities reach `typical_p`, taken in the order of the
    distance between their negative log-probability and the entropy. Equal distances are all kept.
    """
    log_probability = scaled.log_softmax(dim=-1)
    probability = log_probability.exp()
    # nansum: an excluded token is 0 * -inf
    entropy = -(probability * log_probability).nansum(dim=-1, keepdim=True)
    distance = (log_probability + entropy).abs()
    nearest, order = distance.sort(dim=-1)
    cumulative = probability.gather(-1, order).cumsum(dim=-1)
    last = (cumulative < typical_p).sum(dim=-1, keepdim=True).clamp(max=scaled.shape[-1] - 1)
    return (distance <= nearest.gather(-1, last)) | (typical_p >= 1.0)


def _keep(
    values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which of the sorted values are kept, and whether they reach top-p."""
    rank = torch.arange(values.shape[-1], device=values.device)
    kept = (rank < top_k) | (top_k == 0)
    values = values.masked_fill(~kept, float("-inf"))
    # Top-p is relative to what top-k kept; without top-k, to the whole vocabulary (`total`).
    mass = torch.where(top_k == 0, total, values.logsumexp(dim=-1, keepdim=True))
    probability = torch.exp(values - mass)
    cumulative = probability.cumsum(dim=-1)
    kept = kept & ((cumulative - probability < top_p) | (top_p >= 1.0))
    kept = kept & (probability >= min_p * probability[:, :1])
    kept[:, 0] = True
    return kept, cumulative[:, -1:] >= top_p


def _keep_first_of_equals(scaled: Tensor, values: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Of tokens with equal logits at the limit, keep those with the lowest ids, by changing
    `tokens`. Which of them `topk` returns depends on its width, so on the other rows of the batch.
    """
    count = kept.sum(dim=-1, keepdim=True)  # the kept values are the first ones
    limit = values.gather(-1, count - 1)
    following = values.gather(-1, count.clamp(max=values.shape[-1] - 1))
    ambiguous = (following == limit) & (count < values.shape[-1])
    for row in ambiguous.flatten().nonzero().flatten().tolist():
        places = (kept[row] & (values[row] == limit[row])).nonzero().flatten()
        equal = (scaled[row] == limit[row]).nonzero().flatten()
        tokens[row, places] = equal[: len(places)]


def _mix_32(x: Tensor) -> Tensor:
    """Hash 32 bits, held in int64: a bijection in which each input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32_BITS
    return x ^ (x >> 16)
