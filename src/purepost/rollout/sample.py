"""Sampling: one program that prefills each prompt once, branches, and decodes until every row has
ended.
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from ..models.cache import Cache, decode, grow, prefill, unstack
from ..models.decoder import Decoder
from ..types import KeyArray
from ..weights import for_sampling
from .draw import Sampling, draw
from .stop import StopStrings

VECTOR = 16  # float32 numbers that a CPU adds up at once
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
    if step < 1:
        raise ValueError(f"expected step ≥ 1, got {step}")
    size = step
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
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
    if ids is not None and len(ids) != len(prompts):
        raise ValueError(f"expected an id for each of {len(prompts)} prompts, got {len(ids)}")
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


def stages(slots: int) -> list[int]:
    """The sizes that the branches' caches grow through, in tokens: a quarter, a half and all of
    `slots` in whole vectors, none below 32. What is empty is read at every step like what is full.
    """
    whole = [-(-slots // (part * VECTOR)) * VECTOR for part in (4, 2, 1)]
    return [n for n in whole[:-1] if n >= 2 * VECTOR] + whole[-1:]


class _Decoding(eqx.Module):
    """The loop's carry."""

    step: Int[Array, ""]
    completions: Completions
    ended: Bool[Array, "p g"]
    matched: Int[Array, "n w"]  # bytes of each stop string
    cache: Cache


def _emit(
    state: _Decoding,
    logits: Float[Array, "n v"],
    keys: Key[Array, " n"],
    sampling: Sampling,
    stop: StopStrings | None,
) -> _Decoding:
    """Draw this step's token for every row that has not ended."""
    at, ended, c = state.step, state.ended, state.completions
    token, logp = draw(jax.vmap(lambda k: jr.fold_in(k, at))(keys), logits, sampling)
    hit = (token[:, None] == jnp.asarray(sampling.stop_ids, jnp.int32)).any(-1)
    matched = state.matched
    if stop is not None:
        matched, complete = stop.advance(matched, token)
        hit |= complete
    token, logp, hit = (x.reshape(ended.shape) for x in (token, logp, hit))
    completions = Completions(
        c.tokens.at[:, :, at].set(jnp.where(ended, 0, token)),
        c.logps.at[:, :, at].set(jnp.where(ended, 0.0, logp)),
        c.lengths + (~ended).astype(jnp.int32),
        jnp.where(~ended & hit, STOP, c.finish),
    )
    return _Decoding(at + 1, completions, ended | hit, matched, state.cache)


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

    A row's random numbers are those of `fold_in(fold_in(key, prompt id · group + branch), step)`:
    they do not depend on the other rows. Adapters are merged for the length of the call, but for
    those on quantised weights. Error: a prompt window that with `max_tokens` exceeds the model's
    positions.
    """
    (p, width), slots = prompts.tokens.shape, sampling.max_tokens
    if width + slots > model.config.max_positions:
        raise ValueError(
            f"expected prompt window + max_tokens ≤ {model.config.max_positions} positions, "
            f"got {width} + {slots}; shorten one of them"
        )
    model = for_sampling(model)
    blocks, unembed = unstack(model), model.unembed
    ids = prompts.ids[:, None] * group + jnp.arange(group, dtype=jnp.int32)
    keys = jax.vmap(lambda i: jr.fold_in(key, i))(ids.reshape(-1))

    def going_until(step: int) -> Callable[[_Decoding], Bool[Array, ""]]:
        return lambda state: (state.step < step) & ~state.ended.all()

    def advance(state: _Decoding) -> _Decoding:
        at = state.step - 1
        hidden, cache = decode(model, blocks, state.cache, state.completions.tokens[:, :, at], at)
        state = eqx.tree_at(lambda s: s.cache, state, cache)
        return _emit(state, unembed(hidden.reshape(p * group, -1)), keys, sampling, stop)

    first, *more = stages(slots)
    last, cache = prefill(model, prompts.tokens, prompts.lengths, group, first)
    rows = (p, group)
    state = _Decoding(
        step=jnp.zeros((), jnp.int32),
        completions=Completions(
            jnp.zeros((*rows, slots), jnp.int32),
            jnp.zeros((*rows, slots), jnp.float32),
            jnp.zeros(rows, jnp.int32),
            jnp.full(rows, LENGTH, jnp.int32),
        ),
        ended=jnp.zeros(rows, bool),
        matched=jnp.zeros((p * group, 0), jnp.int32) if stop is None else stop.start(p * group),
        cache=cache,
    )
    state = _emit(state, jnp.repeat(unembed(last), group, 0), keys, sampling, stop)
    for room in (first, *more):
        state = eqx.tree_at(lambda s: s.cache, state, grow(state.cache, room))
        drawn = min(room + 1, slots)  # the last one is not in the cache
        state = jax.lax.while_loop(going_until(drawn), advance, state)
    return state.completions
