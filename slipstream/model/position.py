"""Rotary frequencies of every scaling kind, as one table over all positions.

A table holds, for each position, cos and sin of position × frequency for every pair of a head. A
token's key never depends on how its prompt was cut into steps, nor on the rest of its sequence. So
models with dynamic scaling, which depends on the length of the sequence, are served up to the
trained length, where it changes nothing. The two lists of factors of longrope cannot be mixed in
one sequence, so that the longest served sequence chooses the list. Needs no torch.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.model.spec import ModelSpec, RopeScaling


def rotary_size(spec: ModelSpec) -> int:
    """Return the columns of a head that RoPE rotates."""
    return int(spec.head_size * spec.rotary_fraction + 1e-6)  # a share such as 3 / 49 is not exact


def rotary_table(
    spec: ModelSpec, positions: int, theta: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and signed sine, each [positions, rotary_size] in float32, as
    `kernels.rotary.rotate` takes them.

    theta: the base of layers with their own base and no scaling; None: the model's
    """
    size = rotary_size(spec)
    position = np.arange(positions, dtype=np.float32)
    if theta is not None:
        frequencies = _plain_frequencies(theta, size)[None, :]
        scale = 1.0
    else:
        frequencies, scale = _frequencies(spec, size, positions)  # [1, size / 2]
    angles = position[:, None] * frequencies
    cosine = np.cos(angles) * np.float32(scale)
    sine = np.sin(angles) * np.float32(scale)
    return np.concatenate((cosine, cosine), axis=-1), np.concatenate((-sine, sine), axis=-1)


def _frequencies(spec: ModelSpec, size: int, positions: int) -> tuple[np.ndarray, float]:
    """Return frequencies [1, size / 2] and the factor of cos and sin."""
    plain = _plain_frequencies(spec.rope_theta, size)[None, :]
    scaling = spec.rope_scaling
    if scaling is None:
        return plain, 1.0
    original = scaling.original_positions or spec.max_positions
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, original), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, spec.rope_theta, size, original), _yarn_scale(scaling)
    if scaling.kind == "longrope":
        factors = scaling.short_factors if positions <= original else scaling.long_factors
        frequencies = plain / np.array(factors, dtype=np.float32)
        return frequencies, _longrope_scale(scaling, spec, original)
    raise ValueError(f"RoPE scaling {scaling.kind!r} is not served: import the model again")


def _plain_frequencies(theta: float, size: int) -> np.ndarray:
    exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies: np.ndarray = np.float32(1.0) / np.float32(theta) ** exponent
    return frequencies


def _llama3(plain: np.ndarray, scaling: RopeScaling, original: int) -> np.ndarray:
    """Stretch long wavelengths, keep short ones, and blend those in between."""
    wavelength = 2 * math.pi / plain
    longest = original / scaling.low_frequency_factor
    shortest = original / scaling.high_frequency_factor
    stretched = np.where(wavelength > longest, plain / scaling.factor, plain)
    smooth = (original / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    between = (wavelength <= longest) & (wavelength >= shortest)
    return np.where(between, blended, stretched).astype(np.float32)


def _yarn(
    plain: np.ndarray, scaling: RopeScaling, theta: float, size: int, original: int
) -> np.ndarray:
    """Keep dimensions that rotate often within the trained context, stretch those that rotate
    rarely.
    """

    def dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    ramp = ramp.clip(0, 1)[None, :]
    stretched = plain / np.float32(scaling.factor)
    frequencies: np.ndarray = stretched * ramp + plain * (1 - ramp)
    return frequencies


def _yarn_scale(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope_scale(scaling: RopeScaling, spec: ModelSpec, original: int) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = spec.max_positions / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
