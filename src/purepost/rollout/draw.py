"""Drawing a token from logits: temperature, top-k, top-p, min-p, greedy."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, Key

from ..types import Scalar

BLOCK = 256  # vocabulary entries per block of the two-level search


class Sampling(eqx.Module):
    """How completions are drawn.

    `temperature` 0 is greedy. A token is kept if it is among the `top_k` most likely (0: all), in
    the smallest set of probability ≥ `top_p`, and at least `min_p` times as likely as the most
    likely one; ties stay together. `stop_ids` end a completion and are part of it.
    """

    max_tokens: int = eqx.field(static=True)
    temperature: Scalar = 1.0
    top_k: int = eqx.field(static=True, default=0)
    top_p: Scalar = 1.0
    min_p: Scalar = 0.0
    stop_ids: tuple[int, ...] = eqx.field(static=True, default=())

    def __check_init__(self) -> None:
        limits = {
            "max_tokens ≥ 1": self.max_tokens >= 1,
            "temperature ≥ 0": _known(self.temperature, 1.0) >= 0,
            "top_k ≥ 0": self.top_k >= 0,
            "0 < top_p ≤ 1": 0 < _known(self.top_p, 1.0) <= 1,
            "0 ≤ min_p ≤ 1": 0 <= _known(self.min_p, 0.0) <= 1,
        }
        for law, holds in limits.items():
            if not holds:
                raise ValueError(f"expected {law}, got {self}")


def _known(x: Scalar, otherwise: float) -> float:
    """The number, or a stand-in for one that is an array and may be traced."""
    return otherwise if eqx.is_array(x) else float(x)


def _lowest_of_mass(weights: Float[Array, "n v"], mass: Float[Array, " n"]) -> Float[Array, " n"]:
    """The highest threshold at which the weights ≥ it still add up to `mass`, by bisection over
    the floats' bits.
    """

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the mass at `low` suffices, at `high` it does not
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        kept = jnp.where(weights >= threshold[:, None], weights, 0.0).sum(-1)
        enough = kept >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    most = jax.lax.bitcast_convert_type(weights.max(-1), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 32, halve, (jnp.zeros_like(most), most + 1))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def keep_likely(logits: Float[Array, "n v"], sampling: Sampling) -> Float[Array, "n v"]:
    """The logits with −inf in place of what top-k, top-p or min-p leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    if _known(sampling.top_p, 0.5) < 1:
        threshold = _lowest_of_mass(weights, sampling.top_p * weights.sum(-1))
        logits = jnp.where(weights >= threshold[:, None], logits, -jnp.inf)
    if _known(sampling.min_p, 0.5) > 0:
        logits = jnp.where(weights >= sampling.min_p, logits, -jnp.inf)
    return logits


def _in_blocks(weights: Float[Array, "n v"]) -> Float[Array, "n c s"]:
    """The vocabulary in blocks, the last one filled up with zeros."""
    n, v = weights.shape
    size = min(BLOCK, v)
    return jnp.pad(weights, [(0, 0), (0, -v % size)]).reshape(n, -1, size)


def invert_cdf(
    uniform: Float[Array, " n"],
    entries: Float[Array, "n v"],
    weigh: Callable[[Float[Array, "n v"]], Float[Array, "n v"]] = lambda x: x,
) -> Int[Array, " n"]:
    """The index at which the running sum of the weights first exceeds uniform × their total.

    Two levels, blocks and entries, so that one pass over the vocabulary and one random number a row
    suffice: `weigh` makes weights of entries, first for the sums, then of the one block that was
    hit, and the weights of all are never in memory. An entry of weight 0 is never drawn.
    """

    def first_beyond(target: Float[Array, " n"], w: Float[Array, "n j"]) -> Array:
        running = jnp.cumsum(w, -1)
        beyond = (running > target[:, None]) & (w > 0)
        last = (
            w.shape[-1] - 1 - jnp.argmax(w[:, ::-1] > 0, -1)
        )  # where rounding leaves nothing beyond
        return jnp.where(beyond.any(-1), jnp.argmax(beyond, -1), last)

    sums = _in_blocks(weigh(entries)).sum(-1)
    target = uniform * sums.sum(-1)
    block = first_beyond(target, sums)
    before = jnp.take_along_axis(jnp.cumsum(sums, -1) - sums, block[:, None], 1)[:, 0]
    size = min(BLOCK, entries.shape[1])
    at = block[:, None] * size + jnp.arange(size)
    inside = weigh(jnp.take_along_axis(entries, at, 1, mode="clip"))
    inside = jnp.where(at < entries.shape[1], inside, 0.0)
    return (block * size + first_beyond(target - before, inside)).astype(jnp.int32)


def draw(
    keys: Key[Array, " n"], logits: Float[Array, "n v"], sampling: Sampling
) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """(token, its log-probability) of every row, each with its own key.

    The log-probability is over the whole vocabulary at the temperature (at 1 when greedy): it is
    what training's log-probabilities are compared with, whatever was left out in drawing.
    """
    known = _known(sampling.temperature, -1.0)  # negative: an array, which may hold 0
    temperature = jnp.asarray(1.0 if known == 0 else sampling.temperature, jnp.float32)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    top = scaled.max(-1, keepdims=True)
    weigh = lambda x: jnp.exp(x - top)  # noqa: E731
    if known == 0:
        token = jnp.argmax(scaled, -1).astype(jnp.int32)
    else:
        uniform = jax.vmap(lambda k: jr.uniform(k))(keys)
        token = invert_cdf(uniform, keep_likely(scaled, sampling), weigh)
        if known < 0:
            best = jnp.argmax(scaled, -1).astype(jnp.int32)
            token = jnp.where(temperature > 0, token, best)
    chosen = jnp.take_along_axis(scaled, token[:, None], -1) - top
    total = _in_blocks(weigh(scaled)).sum(-1).sum(-1)
    return token, chosen[:, 0] - jnp.log(total)
