"""Sampling from a geometric mixture of two models, token by token."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from ..models.cache import decode, prefill, unstack
from ..models.decoder import Decoder
from ..types import KeyArray, Scalar
from ..weights import for_sampling
from .draw import Sampling, draw
from .sample import LENGTH, STOP, Completions, Prompts


@eqx.filter_jit
def generate_mixture(
    key: KeyArray,
    model: Decoder,
    other: Decoder,
    prompts: Prompts,
    sampling: Sampling,
    *,
    share: Scalar,
) -> Completions:
    """One completion of every prompt, each token from π^{1−share}·π_other^{share}, normalised.

    Log-probabilities are the mixture's. Keys as in `generate`.
    """
    p, slots = prompts.tokens.shape[0], sampling.max_tokens
    pair = tuple(for_sampling(x) for x in (model, other))
    blocks = tuple(unstack(x) for x in pair)
    keys = jax.vmap(lambda i: jr.fold_in(key, i))(prompts.ids)

    def mixed(hidden: list[Float[Array, "p d"]]) -> Float[Array, "p v"]:
        first, second = (x.unembed(h) for x, h in zip(pair, hidden, strict=True))
        return (1 - share) * first + share * second

    def emit(
        at: Any, logits: Float[Array, "p v"], ended: Bool[Array, " p"], done: Completions
    ) -> tuple[Bool[Array, " p"], Completions]:
        token, logp = draw(jax.vmap(lambda k: jr.fold_in(k, at))(keys), logits, sampling)
        hit = (token[:, None] == jnp.asarray(sampling.stop_ids, jnp.int32)).any(-1)
        completions = Completions(
            done.tokens.at[:, 0, at].set(jnp.where(ended, 0, token)),
            done.logps.at[:, 0, at].set(jnp.where(ended, 0.0, logp)),
            done.lengths + (~ended).astype(jnp.int32)[:, None],
            jnp.where(~ended & hit, STOP, done.finish[:, 0])[:, None],
        )
        return ended | hit, completions

    def step(carry: Any, at: Any) -> tuple[Any, None]:
        caches, ended, done = carry
        token = jax.lax.dynamic_index_in_dim(done.tokens, at - 1, 2, keepdims=False)
        found = [
            decode(x, b, cache, token, at - 1)
            for x, b, cache in zip(pair, blocks, caches, strict=True)
        ]
        ended, done = emit(at, mixed([hidden[:, 0] for hidden, _ in found]), ended, done)
        return (tuple(cache for _, cache in found), ended, done), None

    begun = [prefill(x, prompts.tokens, prompts.lengths, 1, slots) for x in pair]
    empty = Completions(
        jnp.zeros((p, 1, slots), jnp.int32),
        jnp.zeros((p, 1, slots), jnp.float32),
        jnp.zeros((p, 1), jnp.int32),
        jnp.full((p, 1), LENGTH, jnp.int32),
    )
    first = emit(0, mixed([last for last, _ in begun]), jnp.zeros(p, bool), empty)
    carry = (tuple(cache for _, cache in begun), *first)
    (_, _, done), _ = jax.lax.scan(step, carry, jnp.arange(1, slots, dtype=jnp.int32))
    return done
