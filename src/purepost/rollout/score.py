"""Log-probabilities and entropies of rows, without ever holding the logits of all tokens.

Only trained tokens reach the vocabulary, a chunk at a time; the backward pass computes a chunk's
logits again and uses ∂logp/∂z = 1[target] − p and ∂H/∂z = −p·(log p + H), so that neither pass
keeps more than one chunk's logits.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..types import KeyArray, LanguageModel, Rows

CHUNK = 256  # tokens whose logits exist at a time


class Scores(eqx.Module):
    """Of every trained token; 0 elsewhere. Nats."""

    logps: Float[Array, "b t"]
    entropies: Float[Array, "b t"]  # of the distribution that the token was drawn from


def _log_softmax(
    unembed: PyTree, hidden: Float[Array, "b c d"], scale: Float[Array, " b"]
) -> Float[Array, "b c v"]:
    """Log-probabilities at temperature 1/scale."""
    return jax.nn.log_softmax(unembed(hidden) * scale[:, None, None])


def _chunks(x: Array, size: int) -> Array:
    """[b, n·size, ...] → [n, b, size, ...]."""
    b, total, *rest = x.shape
    return x.reshape(b, total // size, size, *rest).swapaxes(0, 1)


def _unchunk(x: Array) -> Array:
    """[n, b, size, ...] → [b, n·size, ...]."""
    n, b, size, *rest = x.shape
    return x.swapaxes(0, 1).reshape(b, n * size, *rest)


@eqx.filter_custom_vjp
def _cross_entropy(
    head_and_hidden: tuple[PyTree, Float[Array, "b n d"]],
    targets: Int[Array, "b n"],
    scale: Float[Array, " b"],
    size: int,
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """(log-probability of the target, entropy) of every position; `size` divides n."""
    unembed, hidden = head_and_hidden

    def chunk(x: Any) -> tuple[Array, Array]:
        h, target = x
        logps = _log_softmax(unembed, h, scale)
        p = jnp.exp(logps)
        entropy = -jnp.where(p > 0, p * logps, 0.0).sum(-1)
        return jnp.take_along_axis(logps, target[..., None], -1)[..., 0], entropy

    logp, entropy = jax.lax.map(chunk, (_chunks(hidden, size), _chunks(targets, size)))
    return _unchunk(logp), _unchunk(entropy)


@_cross_entropy.def_fwd
def _forward(perturbed: Any, head_and_hidden: Any, targets: Any, scale: Any, size: int) -> Any:
    out = _cross_entropy(head_and_hidden, targets, scale, size)
    return out, out[1]


@_cross_entropy.def_bwd
def _backward(
    entropies: Any,
    grads: Any,
    perturbed: Any,
    head_and_hidden: Any,
    targets: Any,
    scale: Any,
    size: int,
) -> Any:
    head, fixed = eqx.partition(head_and_hidden[0], perturbed[0])
    hidden = head_and_hidden[1]
    zeros = jnp.zeros(targets.shape)
    grad_logp, grad_entropy = (zeros if g is None else g for g in grads)

    def chunk(total: Any, x: Any) -> tuple[Any, Array]:
        h, target, entropy, g_logp, g_entropy = x
        logits, pull = jax.vjp(lambda w, h: eqx.combine(w, fixed)(h), head, h)
        logps = jax.nn.log_softmax(logits * scale[:, None, None])
        p = jnp.exp(logps)
        hit = target[..., None] == jnp.arange(p.shape[-1], dtype=target.dtype)
        surprise = jnp.where(p > 0, p * (logps + entropy[..., None]), 0.0)
        grad = jnp.where(hit, 1 - p, -p) * g_logp[..., None] - surprise * g_entropy[..., None]
        d_head, d_hidden = pull(grad * scale[:, None, None])
        return jax.tree.map(lambda a, d: a + d.astype(a.dtype), total, d_head), d_hidden

    zero = jax.tree.map(lambda w: jnp.zeros(w.shape), head)
    xs = [_chunks(x, size) for x in (hidden, targets, entropies, grad_logp, grad_entropy)]
    total, d_hidden = jax.lax.scan(chunk, zero, tuple(xs))
    total = jax.tree.map(lambda t, w: t.astype(w.dtype), total, head)
    return total, (_unchunk(d_hidden) if perturbed[1] else None)


def score(
    model: LanguageModel,
    rows: Rows,
    *,
    temperature: Float[Array, " b"] | None = None,
    key: KeyArray | None = None,
    chunk: int = CHUNK,
) -> Scores:
    """Log-probability and entropy of every trained token of the rows, float32.

    `temperature` divides a row's logits, as in sampling; `key` turns dropout on; `chunk` is the
    number of tokens whose logits exist at a time.
    """
    hidden, _ = model(rows, key=key)
    b, t = rows.tokens.shape
    cap = min(rows.most_trained, t)
    if cap < t:
        index = jax.vmap(lambda m: jnp.nonzero(m, size=cap, fill_value=t)[0])(rows.mask)
    else:
        index = jnp.broadcast_to(jnp.arange(t), (b, t))
    size = max(1, min(chunk // b, cap))
    index = jnp.pad(index.astype(jnp.int32), [(0, 0), (0, -cap % size)], constant_values=t)
    place = jnp.minimum(index, t - 1)
    parent = jnp.take_along_axis(rows.parent, place, 1)
    scale = jnp.ones(b) if temperature is None else 1 / jnp.where(temperature > 0, temperature, 1)
    logp, entropy = _cross_entropy(
        (model.unembed, jnp.take_along_axis(hidden, parent[..., None], 1)),
        jnp.take_along_axis(rows.tokens, place, 1),
        scale,
        size,
    )

    def back(x: Float[Array, "b n"]) -> Float[Array, "b t"]:
        filled = jax.vmap(lambda i, x: jnp.zeros(t).at[i].set(x, mode="drop"))(index, x)
        return jnp.where(rows.mask, filled, 0.0)

    return Scores(back(logp), back(entropy))
