"""Rotary positions: frequencies, how they are stretched beyond the trained context, rotation.

Source: Su et al., RoFormer, 2104.09864, §3.2.2.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("linear", "dynamic", "llama3", "yarn", "proportional")

Angles = tuple[Float[Array, "*s half"], Float[Array, "*s half"]]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond `original_max_positions`, the trained context.

    "linear" divides all by the factor. "dynamic" raises the base as the model's positions grow
    past the trained ones (they are the model's, never a row's: a token's keys do not depend on
    what follows it). "llama3" divides long waves only, by wavelength; "yarn" by turns in the
    trained context, and multiplies keys and queries by `attention_factor`. "proportional" divides
    all, and turns the share `rotated` of a head's features only, the fastest.
    Source: Peng et al., YaRN, 2309.00071, §3.1-3.4; Llama 3.1's by wavelength.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # turns beyond which a wave is left as it is
    beta_slow: float = 1.0  # turns below which it takes all of the stretch
    truncate: bool = True  # the two bounds are rounded to whole features
    rotated: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"expected a RoPE scaling of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.factor > 0:
            raise ValueError(f"expected a RoPE factor above 0, got {self.factor}")
        if not 0 < self.rotated <= 1:
            raise ValueError(f"expected a share 0 < rotated ≤ 1, got {self.rotated}")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"expected low_freq_factor below high_freq_factor, got {self.low_freq_factor} "
                f"and {self.high_freq_factor}"
            )


class Rope(NamedTuple):
    """Inverse frequencies, radians per token, and what cosine and sine are multiplied by."""

    frequencies: Float[np.ndarray, " half"]
    scale: float

    def angles(self, positions: Int[Array, "*s"]) -> Angles:
        """(cos, sin) of position × frequency, scaled."""
        cos, sin = rope_angles(positions, self.frequencies)
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, max_positions: int = 0
) -> Float[np.ndarray, " half"]:
    """Inverse frequencies, radians per token; `max_positions`, the model's, stretches "dynamic"."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies.astype(np.float32)
    factor = scaling.factor
    match scaling.kind:
        case "linear":
            kept = np.zeros_like(frequencies)
        case "dynamic":
            ratio = max(1.0, max_positions / scaling.original_max_positions)
            longer = (factor * ratio - (factor - 1)) ** (head_dim / (head_dim - 2))
            return (1.0 / (theta * longer) ** exponents).astype(np.float32)
        case "proportional":
            turning = np.arange(head_dim // 2) < int(scaling.rotated * head_dim // 2)
            return np.where(turning, frequencies / factor, 0.0).astype(np.float32)
        case "llama3":
            wavelengths = 2 * math.pi / frequencies
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = (scaling.original_max_positions / wavelengths - low) / (high - low)
        case _:
            kept = 1 - _yarn_ramp(head_dim, theta, scaling)
    kept = np.clip(kept, 0, 1)  # 0: all of the stretch; 1: none
    return (frequencies * ((1 - kept) / factor + kept)).astype(np.float32)


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> Float[np.ndarray, " half"]:
    """Where in the range between `beta_fast` and `beta_slow` turns a pair of features lies."""

    def feature(turns: float) -> float:
        """The pair, as a real number, whose wave turns so often in the trained context."""
        wavelength = scaling.original_max_positions / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return (np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The factor of a configuration that names none: .1 ln(factor) + 1, or, where both mscales are
    given, that of the one over that of the other.
    """

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def rope_angles(positions: Int[Array, "*s"], frequencies: Float[np.ndarray, " half"]) -> Angles:
    """(cos, sin) of position × frequency."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*s h k"], cos: Float[Array, "*s half"], sin: Float[Array, "*s half"]
) -> Float[Array, "*s h k"]:
    """Turn the pairs (x_i, x_{i + k/2}) of every head by the angles."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    c, s = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)
