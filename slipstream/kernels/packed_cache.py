"""The 12-bit KV cache: bfloat16 keys and values in little more than three quarters of their bytes.

Attention reads a quarter less, and the same memory holds almost a third more tokens. Switch:
`KernelOptions.compressed_kv_cache`.

As in a row of weights (`kernels/bf12.py`), four bits hold the distance of a number's exponent from
the largest one of its token's head. So a number has 12 bits and is the same number. The exception
is numbers more than 2^14 times smaller than the largest of their head: they may lose at most 2^-22
of it. From 2^80 on a number is infinite.

The four runs of a head are the even columns of its first half, the odd ones, and those of its
second half: RoPE pairs the halves, and neighbouring columns are in one thread. Three runs of 16-bit
words hold them, with the fourth in the bits that exponents left free. 32 tokens are stored
together: the first run of all of them, so that a load reads contiguous memory, the second, the
third, then their scales. Scales are the upper halves of float32 powers of two, 2^64 times smaller
than the factor of a number read as bfloat16. Empty words behind them align the next tokens to 128
bytes.
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
    e4m3 on request, 12 bits where they cost no accuracy, else `dtype`.

    rotary_size: columns of a head that RoPE rotates, 0 without RoPE.
    """
    if fp8 and converts_e4m3(device):
        return torch.float8_e4m3fn
    fits = packs(dtype, head_size, rotary_size, block_tokens)
    if device.type == "cuda" and options.compressed_kv_cache and fits:
        return DTYPE
    return dtype


def packs(dtype: torch.dtype, head_size: int, rotary_size: int, block_tokens: int) -> bool:
    """Return whether the 12-bit format can hold keys and values of this type and these sizes."""
    rotated = rotary_size == head_size
    fits = head_size in _SIZES and block_tokens % TOKENS == 0
    return dtype == torch.bfloat16 and rotated and fits


def converts_e4m3(device: torch.device) -> bool:
    """Return whether the device has instructions that convert e4m3: Ada and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
