"""The 12-bit KV cache: bfloat16 keys and values in little more than three quarters of their bytes.

Attention reads a quarter less, and the same memory holds almost a third more tokens. Switch:
`KernelOptions.compressed_kv_cache`.

A number has 12 bits, as in `kernels/bf12.py`: the sign, seven bits of mantissa, and four bits that
say how far its exponent is from the largest exponent of its head (of one token). Packing keeps the
number exactly. The exception is numbers more than 2^14 times smaller than the largest of their
head: they may lose at most 2^-22 of it. A number of 2^80 or more becomes infinite.

A head's columns form four runs: the even and the odd columns of its first half, then the even and
the odd columns of its second half. This is because RoPE pairs the halves, and because a thread
holds neighbouring columns. Number i of all four runs shares three 16-bit words. The words hold the
numbers of runs 1 to 3 at bfloat16's bit positions. Run 4's number is spread over the four upper
exponent bits that these do not need (S sign, E exponent, M mantissa; small letters: run 4):

    bit      15   14 13 12 11   10  9  8  7    6  5  4  3  2  1  0
    word 1    S   m3 m2 m1 m0   E3 E2 E1 E0   M6 M5 M4 M3 M2 M1 M0    run 1
    word 2    S   e0 m6 m5 m4   E3 E2 E1 E0   M6 M5 M4 M3 M2 M1 M0    run 2
    word 3    S    s e3 e2 e1   E3 E2 E1 E0   M6 M5 M4 M3 M2 M1 M0    run 3

32 tokens of a KV head are stored together, so that a load reads contiguous memory:

    | word 1 of 32 tokens | word 2 of 32 tokens | word 3 of 32 tokens | 32 scales | 32 empty words |

A scale is a power of two: the upper half of a float32. It is 2^64 times smaller than the factor for
a number that is read as bfloat16. The empty words align the next tokens to 128 bytes.
"""

from __future__ import annotations

import torch

from slipstream.kernels.options import KernelOptions

DTYPE = torch.int16
_SIZES = (64, 128, 256)  # head sizes whose runs the tensor cores take
TOKENS = 32  # tokens that are stored together


def words(head_size: int) -> int:
    """Return the 16-bit words of a token's head, with its scale and an empty word."""
    return head_size // 4 * 3 + 2


def kv_cache_dtype(
    dtype: torch.dtype,
    device: torch.device,
    head_size: int,
    rotary_size: int,
    block_tokens: int,
    fp8: bool,
    options: KernelOptions,
) -> torch.dtype:
    """Return the type of cached keys and values in a run whose activations are of type `dtype`:
    e4m3 on request, 12 bits if they cost no accuracy, else `dtype`.

    rotary_size: columns of a head that RoPE rotates, 0 without RoPE.
    """
    if fp8 and converts_e4m3(device):
        return torch.float8_e4m3fn
    fits = can_pack(dtype, head_size, rotary_size, block_tokens)
    if device.type == "cuda" and options.compressed_kv_cache and fits:
        return DTYPE
    return dtype


def can_pack(dtype: torch.dtype, head_size: int, rotary_size: int, block_tokens: int) -> bool:
    """Return whether the 12-bit format can hold keys and values of this type and these sizes."""
    rotated = rotary_size == head_size
    fits = head_size in _SIZES and block_tokens % TOKENS == 0
    return dtype == torch.bfloat16 and rotated and fits


def converts_e4m3(device: torch.device) -> bool:
    """Return whether the device has instructions that convert e4m3: Ada and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
