"""bfloat16 weights in three quarters of their bytes, for products that are bound by reading them.

The exponents of a row of trained weights lie close together: four bits tell how far one is below
the row's largest. With the sign and the seven bits of mantissa a number has twelve bits, and is the
same number. Only what is more than 2^14 times smaller than the largest of its row may lose bits of
its mantissa, never more than 2^-22 of that largest number, of which bfloat16 itself keeps no more
than 2^-9.

Four runs of 64 numbers become three runs of 64 words of 16 bits: sign, exponent and mantissa of the
first three runs' numbers stay where bfloat16 has them, and in the four bits that the exponents no
longer need lies the last run's number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RUN = 64  # numbers
GROUP = 4 * RUN  # numbers that lie in 3 × RUN words
_OWN = 0x87FF  # of a word: sign, low four bits of the exponent, mantissa
# numbers that are packed at once: what stands beside them takes twenty times their memory
_SLICE = 2**23
_MOST_LOSING = 1 / 32  # of a row's numbers: where more lose bits, it might be felt


class Bf12Weight(NamedTuple):
    words: Tensor  # int16 [rows, columns × 3 / 4]
    scales: Tensor  # float32 [rows]: powers of two


def packs(weight: Tensor) -> bool:
    """Whether a weight [rows, columns] has a type and sizes that can be packed."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % GROUP == 0


def pack(weight: Tensor) -> Bf12Weight | None:
    """The weight in twelve bits; None where that might be felt, because many of a row's numbers
    lose bits, and where one is infinite or none.
    """
    rows, columns = weight.shape
    words = torch.empty((rows, columns // 4 * 3), dtype=torch.int16, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    taken = max(1, _SLICE // columns)
    for begin in range(0, rows, taken):
        part = slice(begin, begin + taken)
        words[part], scales[part], safe = _pack(weight[part])
        if not safe:
            return None
    return Bf12Weight(words, scales)


def unpack(packed: Bf12Weight) -> Tensor:
    """→ float32 [rows, columns]"""
    runs = (packed.words.to(torch.int32) & 0xFFFF).view(packed.words.shape[0], -1, 3, RUN)
    first, second, third = runs.unbind(2)
    last = first >> 11 & 0x000F | second >> 7 & 0x00F0 | third >> 3 & 0x0700 | third << 1 & 0x8000
    bits = torch.stack((first & _OWN, second & _OWN, third & _OWN, last), 2).flatten(1)
    # As float32's bits the numbers are tiny, and the smallest have no leading one: 2^112 makes them
    # what they are.
    return (
        (_sixteen(bits).to(torch.int32) << 16).view(torch.float32)
        * 2.0**112
        * packed.scales[:, None]
    )


def _pack(weight: Tensor) -> tuple[Tensor, Tensor, bool]:
    bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    most = exponent.amax(1, keepdim=True)
    least = (most - 15).clamp(min=0)
    # Below the least exponent a number is a multiple of that exponent's last place, as float's
    # smallest are.
    below = (least + 1 - exponent.clamp(min=1)).clamp_(0, 16)
    whole = torch.where(exponent > 0, mantissa | 0x80, mantissa)
    rounded = whole + (1 << below >> 1) >> below
    number = (
        torch.where(exponent > least, exponent - least << 7 | mantissa, rounded) | bits & 0x8000
    )
    first, second, third, last = number.view(weight.shape[0], -1, 4, RUN).unbind(2)
    first = first | (last & 0x000F) << 11
    second = second | (last & 0x00F0) << 7
    third = third | (last & 0x0700) << 3 | (last & 0x8000) >> 1
    words = _sixteen(torch.stack((first, second, third), 2).flatten(1))
    losing = (rounded << below != whole).sum(1, dtype=torch.float32).amax() / weight.shape[1]
    # an exponent of 255: infinity, or no number
    safe = bool((losing <= _MOST_LOSING) & (most.amax() < 255))
    # the powers of two, by their exponents
    return words, (least + 15 << 23).view(torch.float32)[:, 0], safe


def _sixteen(bits: Tensor) -> Tensor:
    """int32 of 0 to 65535 → int16 with the same bits"""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)
