"""Sampling: one program that prefills each prompt once, branches, and decodes until every row has
ended.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..models.cache import Cache, decode, prefill, unstack
from ..models.decoder import Decoder
from ..types import KeyArray
from ..weights import merge
from .draw import Sampling, draw
from .stop import StopStrings

LENGTH, STOP = 0, 1  # why a completion ended: out of tokens, or by a stop id or string


class Prompts(eqx.Module):
    """Prompts padded on the right to one width."""

    tokens: Int[Array, "p s"]
    lengths: Int[Array, " p"]
    ids: Int[Array, " p"]  # what a prompt's random numbers belong to


class Completions(eqx.Module):
    """g completions of each of p prompts. A stop id is part of its completion."""

    tokens: Int[Array, "p g t"]
    logps: Float[Array, "p g t"]  # at the sampling temperature over the whole vocabulary, nats
    lengths: Int[Array, "p g"]  # tokens
    finish: Int[Array, "p g"]  # LENGTH or STOP

    @property
    def mask(self) -> Bool[Array, "p g t"]:
        """The sampled tokens: made from lengths, never from ids."""
        return jnp.arange(self.tokens.shape[-1]) < self.lengths[..., None]


def bucket(length: int, step: int = 32) -> int:
    """The length rounded up to one of few sizes, 1, 1½, 2, 3, … × `step`, so that few programs
    are compiled.
    """
    size = step
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def pad_prompts(
    prompts: Sequence[Sequence[int]],
    *,
    ids: Sequence[int] | None = None,
    width: int | None = None,
) -> Prompts:
    """Token lists as one array of `width` tokens; by default the longest prompt's bucket.

    Errors: no prompts, an empty prompt, a prompt longer than the width.
    """
    if not prompts:
        raise ValueError("expected at least one prompt, got none")
    lengths = [len(p) for p in prompts]
    width = bucket(max(lengths)) if width is None else width
    for i, n in enumerate(lengths):
        if not 1 <= n <= width:
            raise ValueError(
                f"expected prompts of 1 to {width} tokens, got {n} in prompt {i}; "
                "shorten or drop it, or widen the window"
            )
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Prompts(
        jnp.asarray(tokens),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(range(len(prompts)) if ids is None else ids, jnp.int32),
    )


class _Decoding(eqx.Module):
    """The loop's carry."""

    step: Int[Array, ""]
    completions: Completions
    ended: Bool[Array, "p g"]
    matched: Int[Array, "p g w"]  # bytes of each stop string
    cache: Cache


@eqx.filter_jit
def generate(
    key: KeyArray,
    model: Decoder,
    prompts: Prompts,
    sampling: Sampling,
    *,
    group: int = 1,
    stop: StopStrings | None = None,
) -> Completions:
    """`group` completions of every prompt.

    A row's random numbers are those of `fold_in(fold_in(key, prompt id · group + branch),
    position)`: they do not depend on the other rows. Adapters are merged for the length of the
    call. Error: a prompt window that with `max_tokens` exceeds the model's positions.
    """
    p, width = prompts.tokens.shape
    slots = sampling.max_tokens
    if width + slots > model.config.max_positions:
        raise ValueError(
            f"expected prompt window + max_tokens ≤ {model.config.max_positions} positions, "
            f"got {width} + {slots}; shorten one of them"
        )
    model = merge(model)
    blocks = unstack(model)
    rollout_ids = prompts.ids[:, None] * group + jnp.arange(group, dtype=jnp.int32)
    keys = jax.vmap(lambda i: jr.fold_in(key, i))(rollout_ids.reshape(-1))
    stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

    def emit(state: _Decoding, hidden: Float[Array, "p g d"]) -> _Decoding:
        """Draw the token of this step for every row that has not ended."""
        position_keys = jax.vmap(lambda k: jr.fold_in(k, state.step))(keys)
        logits = model.unembed(hidden).reshape(p * group, -1)
        token, logp = draw(position_keys, logits, sampling)
        hit = (token[:, None] == stop_ids).any(-1)
        matched = state.matched
        if stop is not None:
            flat, complete = stop.advance(matched.reshape(p * group, -1), token)
            matched, hit = flat.reshape(matched.shape), hit | complete
        token, logp, hit = (x.reshape(p, group) for x in (token, logp, hit))
        live, c, at = ~state.ended, state.completions, state.step
        completions = Completions(
            c.tokens.at[:, :, at].set(jnp.where(live, token, 0)),
            c.logps.at[:, :, at].set(jnp.where(live, logp, 0.0)),
            c.lengths + live.astype(jnp.int32),
            jnp.where(live & hit, STOP, c.finish),
        )
        return _Decoding(at + 1, completions, state.ended | hit, matched, state.cache)

    def advance(state: _Decoding) -> _Decoding:
        at = state.step - 1
        hidden, cache = decode(model, blocks, state.cache, state.completions.tokens[:, :, at], at)
        return emit(eqx.tree_at(lambda s: s.cache, state, cache), hidden)

    hidden, cache = prefill(model, prompts.tokens, prompts.lengths, group, slots - 1)
    rows = (p, group)
    words = 0 if stop is None else stop.lengths.shape[0]
    state = _Decoding(
        jnp.zeros((), jnp.int32),
        Completions(
            jnp.zeros((*rows, slots), jnp.int32),
            jnp.zeros((*rows, slots), jnp.float32),
            jnp.zeros(rows, jnp.int32),
            jnp.full(rows, LENGTH, jnp.int32),
        ),
        jnp.zeros(rows, bool),
        jnp.zeros((*rows, words), jnp.int32),
        cache,
    )
    state = emit(state, jnp.broadcast_to(hidden[:, None], (*rows, hidden.shape[-1])))
    state = jax.lax.while_loop(lambda s: (s.step < slots) & ~s.ended.all(), advance, state)
    return state.completions
