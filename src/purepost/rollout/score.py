"""Log-probabilities and entropies of rows, without ever holding the logits of all tokens.

Only trained tokens reach the vocabulary, a chunk at a time; the backward pass computes a chunk's
logits again and uses ∂logp/∂z = 1[target] − p and ∂H/∂z = −p·(log p + H), so that neither pass
keeps more than one chunk's logits. Of the whole vocabulary, ∂(mean log p)/∂z = 1/v − p and
∂(log Z)/∂z = p. Tokens that fit in one chunk have their logits computed once: the backward pass
reads the forward pass's. Nor is a head that does not train applied again: the forward pass keeps
∂logp/∂hidden, as many numbers as the hidden states are.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PyTree

from ..types import KeyArray, LanguageModel, Rows
from .trained import CHUNK, Trained, tokens_at_once


class Scores(eqx.Module):
    """Of every trained token; 0 elsewhere. Nats."""

    logps: Float[Array, "b t"]
    entropies: Float[Array, "b t"]  # of the distribution that the token was drawn from
    mean_logps: Float[Array, "b t"] | None = None  # the mean of log p over the vocabulary
    normalizers: Float[Array, "b t"] | None = None  # log Z: log p is the logit less it


def _hit(target: Int[Array, "b s"], p: Float[Array, "b s v"]) -> Float[Array, "b s v"]:
    """1 at the target, else 0."""
    return (target[..., None] == jnp.arange(p.shape[-1], dtype=target.dtype)).astype(p.dtype)


def _of_logits(
    logits: Float[Array, "b s v"], target: Int[Array, "b s"]
) -> tuple[Float[Array, "b s v"], Float[Array, "b s v"], Float[Array, "b s"], Float[Array, "b s"]]:
    """(log p, p, the target's log p, the entropy)."""
    logps = jax.nn.log_softmax(logits)
    p = jnp.exp(logps)
    entropy = -jnp.where(p > 0, p * logps, 0.0).sum(-1)
    return logps, p, jnp.take_along_axis(logps, target[..., None], -1)[..., 0], entropy


def _finer(
    chunk: Callable[[Any], tuple[Array, ...]],
    hidden: Float[Array, "c b s d"],
    targets: Int[Array, "c b s"],
) -> tuple[Array, ...]:
    """A function of chunks, on parts of them of about CHUNK tokens: for passes that gain nothing by
    larger ones but need their memory.
    """
    _, b, size = targets.shape
    parts = next(n for n in range(-(-b * size // CHUNK), 0, -1) if size % n == 0)
    there, back = "c b (n s) ... -> (c n) b s ...", "(c n) b s ... -> c b (n s) ..."
    found = jax.lax.map(chunk, tuple(rearrange(x, there, n=parts) for x in (hidden, targets)))
    return tuple(rearrange(x, back, n=parts) for x in found)


def _values(
    unembed: Any, scale: Float[Array, " b"], whole: bool
) -> Callable[[Any], tuple[Array, ...]]:
    """(hidden states, targets) of a chunk → what `_cross_entropy` gives of them."""

    def chunk(x: Any) -> tuple[Array, ...]:
        h, target = x
        logits = unembed(h) * scale[:, None, None]
        logps, _, *usual = _of_logits(logits, target)
        return (*usual, logps.mean(-1), jax.nn.logsumexp(logits, -1)) if whole else (*usual,)

    return chunk


@eqx.filter_custom_vjp
def _cross_entropy(
    head_and_hidden: tuple[PyTree, Float[Array, "c b s d"]],
    targets: Int[Array, "c b s"],
    scale: Float[Array, " b"],
    whole: bool,
) -> tuple[Float[Array, "c b s"], ...]:
    """(log-probability of the target, entropy) of every position, and if `whole` (mean of log p
    over the vocabulary, log Z), a chunk at a time.
    """
    unembed, hidden = head_and_hidden
    return _finer(_values(unembed, scale, whole), hidden, targets)


@_cross_entropy.def_fwd
def _forward(perturbed: Any, head_and_hidden: Any, targets: Any, scale: Any, whole: bool) -> Any:
    unembed, hidden = head_and_hidden
    if whole or any(jax.tree.leaves(perturbed[0])):
        out = jax.lax.map(_values(unembed, scale, whole), (hidden, targets))
        return out, (out[1], None)

    # The head is frozen: what the gradient of log p needs of it is found with the logits at hand.
    def chunk(x: Any) -> tuple[Array, ...]:
        h, target = x
        logits, pull = jax.vjp(unembed, h)
        _, p, logp, entropy = _of_logits(logits * scale[:, None, None], target)
        (slope,) = pull(_hit(target, p) - p)
        return logp, entropy, slope * scale[:, None, None].astype(slope.dtype)

    logp, entropy, slope = _finer(chunk, hidden, targets)
    return (logp, entropy), (entropy, slope)


@_cross_entropy.def_bwd
def _backward(
    kept: Any,
    grads: Any,
    perturbed: Any,
    head_and_hidden: Any,
    targets: Any,
    scale: Any,
    whole: bool,
) -> Any:
    head, fixed = eqx.partition(head_and_hidden[0], perturbed[0])
    hidden, (entropies, slope) = head_and_hidden[1], kept
    if slope is not None and grads[1] is None:
        return head, (slope * grads[0][..., None]).astype(slope.dtype)

    def chunk(total: Any, x: Any) -> tuple[Any, Array]:
        h, target, entropy, grads = x
        logits, pull = jax.vjp(lambda w, h: eqx.combine(w, fixed)(h), head, h)
        logps = jax.nn.log_softmax(logits * scale[:, None, None])
        p = jnp.exp(logps)
        slopes = (
            lambda: _hit(target, p) - p,
            lambda: -jnp.where(p > 0, p * (logps + entropy[..., None]), 0.0),
            lambda: 1 / p.shape[-1] - p,
            lambda: p,
        )
        scaled = [None if g is None else (g * scale[:, None])[..., None] for g in grads]
        grad = sum(slope() * g for slope, g in zip(slopes, scaled, strict=False) if g is not None)
        d_head, d_hidden = pull(grad)
        return jax.tree.map(lambda a, d: a + d.astype(a.dtype), total, d_head), d_hidden

    zero = jax.tree.map(lambda w: jnp.zeros(w.shape), head)
    total, d_hidden = jax.lax.scan(chunk, zero, (hidden, targets, entropies, grads))
    total = jax.tree.map(lambda t, w: t.astype(w.dtype), total, head)
    return total, (d_hidden if perturbed[1] else None)


def score(
    model: LanguageModel,
    rows: Rows,
    *,
    temperature: Float[Array, " b"] | None = None,
    key: KeyArray | None = None,
    chunk: int | None = None,
    whole: bool = False,
) -> Scores:
    """Log-probability and entropy of every trained token of the rows, float32.

    `temperature` divides a row's logits, as in sampling; `key` turns dropout on; `chunk` is the
    number of tokens whose logits exist at a time, by default as many as make up to 2²⁶ logits;
    `whole` adds what is read of all logits.
    """
    states, unembed = model(rows, key=key)[0], model.unembed
    trained = Trained.of(rows, tokens_at_once(unembed, states) if chunk is None else chunk)
    hidden = trained.chunks(trained.gather(states))
    b = rows.tokens.shape[0]
    scale = jnp.ones(b) if temperature is None else 1 / jnp.where(temperature > 0, temperature, 1)
    targets = trained.chunks(trained.targets)
    found = _cross_entropy((unembed, hidden), targets, scale, whole)
    return Scores(*map(trained.back, found))
