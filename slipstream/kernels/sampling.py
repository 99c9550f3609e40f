"""Drawing tokens from logits: seeded noise, and the narrowing of the choice by top-k, top-p, min-p
and typical-p.

A draw adds Gumbel noise to the scaled logits and takes the largest. The noise of a token is a hash
of (seed, position, token), so a draw never depends on the other rows of the batch, and need only be
made for tokens that are still in the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32_BITS = 0xFFFFFFFF
_LOW_64_BITS = 0xFFFFFFFFFFFFFFFF

# Top-p alone looks at this many tokens first: their mass nearly always exceeds p, and sorting all
# costs more.
_FIRST_LOOK = 1024


def noise_key(seed: int, position: int) -> int:
    """32 bits that stand for a seed at a position."""
    mixed = _mix_64((seed & _LOW_64_BITS) ^ _mix_64(position + 1))
    return mixed >> 32


def gumbel(tokens: Tensor, keys: Tensor) -> Tensor:
    """tokens: int64 [rows, n] or [n]; keys: int64 [rows, 1] → float32 noise [rows, n]."""
    bits = _mix_32(_mix_32(tokens) ^ keys) >> 8
    uniform = (bits.float() + 0.5) * 2.0**-24  # strictly between 0 and 1
    return -torch.log(-torch.log(uniform))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab] → the largest of each row and its token, the first of equals; nan where
    one is.
    """
    if logits.device.type == "cuda":
        # a CPU installation has no Triton
        from slipstream.kernels.gpu.step import likeliest as on_gpu

        return on_gpu(logits)
    best, tokens = logits.max(dim=-1)
    return best, tokens


def draw_from_all(
    logits: Tensor,  # [rows, vocab] float32
    temperature: Tensor,  # [rows, 1], above 0
    min_p: Tensor | None,  # [rows, 1]; None: off for all
    keys: Tensor,  # [rows, 1] int64
    typical_p: Tensor | None = None,  # [rows, 1], 1: off; None: off for all
) -> Tensor:
    """→ tokens [rows], from the whole vocabulary down to min-p of the likeliest."""
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
    widest: int,  # the largest top_k, or 0 when a row narrows by top-p alone
    typical_p: Tensor | None = None,  # [rows, 1], 1: off; None: off for all
) -> Tensor:
    """→ tokens [rows]. Temperature first, then top-k, top-p within it, min-p against the likeliest."""
    scaled, vocab = logits / temperature, logits.shape[-1]
    by_p_alone = top_k == 0
    total = torch.where(by_p_alone, scaled.logsumexp(dim=-1, keepdim=True), float("nan"))
    # On a GPU looking whether the first look sufficed would stop the stream; sorting all costs less
    # there.
    width = min(widest or (_FIRST_LOOK if logits.device.type == "cpu" else vocab), vocab)
    values, tokens = scaled.topk(width, dim=-1)  # largest first
    kept, reached = _keep(values, top_k, top_p, min_p, total)
    if width < vocab and not widest and not bool((reached | ~by_p_alone).all()):
        values, tokens = scaled.sort(dim=-1, descending=True)
        kept, _ = _keep(values, top_k, top_p, min_p, total)
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
    """Which of the sorted values stay in the choice, and whether top-p was reached within them."""
    rank = torch.arange(values.shape[-1], device=values.device)
    kept = (rank < top_k) | (top_k == 0)
    values = values.masked_fill(~kept, float("-inf"))
    # Top-p counts the mass of what top-k left; without top-k, of the whole vocabulary (`total`).
    mass = torch.where(top_k == 0, total, values.logsumexp(dim=-1, keepdim=True))
    probability = torch.exp(values - mass)
    cumulative = probability.cumsum(dim=-1)
    kept = kept & ((cumulative - probability < top_p) | (top_p >= 1.0))
    kept = kept & (probability >= min_p * probability[:, :1])
    kept[:, 0] = True
    return kept, cumulative[:, -1:] >= top_p


def _mix_32(x: Tensor) -> Tensor:
    """A bijection on 32 bits in which every input bit moves every output bit; x: int64 holding 32
    bits.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32_BITS
    return x ^ (x >> 16)


def _mix_64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _LOW_64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LOW_64_BITS
    return x ^ (x >> 31)
