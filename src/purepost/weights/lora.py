"""Low-rank adapters as a transform of a model: y = xW + s·(xA)B, with B = 0 at the start.

DoRA also learns how long each column is: W' = m · (W + s·AB) / ‖W + s·AB‖, the norm taken as a
constant in the gradient. PiSSA begins with the r largest singular values of W, s·AB, on what is
left of it, W − s·AB.

Source: Hu et al., LoRA, 2106.09685, eq. 3; s = α/r. rsLoRA, Kalajdzievski, 2312.03732: s = α/√r.
Liu et al., DoRA, 2402.09353, eq. 5 and §4.3. Meng et al., PiSSA, 2404.02948, eq. 2-4.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from .. import tree
from ..types import KeyArray
from .quantized import Quantized, like

Model = TypeVar("Model")

# Every matrix of the decoder's layers; embeddings and head are left out, as is usual.
ALL_LINEAR = r"layers\.(\d+\.)?(attention\.[qkvo]|(experts\.)?mlp\.(gate|up|down))$"


class LowRank(eqx.Module):
    """A weight W + s·A@B whose base is any other kind of weight; with a magnitude, each of its
    columns is as long as that says. An adapter taken off its base has None there.
    """

    base: Any
    a: Float[Array, "*l i r"]
    b: Float[Array, "*l r o"]
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)
    magnitude: Float[Array, "*l o"] | None = None


class Merged(eqx.Module):
    """An adapted weight that was merged, beside what it was made of."""

    value: Float[Array, "*l i o"]
    parts: LowRank


class Factors(NamedTuple):
    """How an adapter begins: its base, A and B."""

    base: Float[Array, "*l i o"] | Quantized
    a: Float[Array, "*l i r"]
    b: Float[Array, "*l r o"]


# (key, the weight, rank, scale) → base, A and B
Start = Callable[[KeyArray, Float[Array, "*l i o"] | Quantized, int, float], Factors]


def is_adapted(x: Any) -> bool:
    """Whether it is a weight with an adapter."""
    return isinstance(x, LowRank)


def is_kind(x: Any) -> bool:
    """Whether it is a weight that is no raw array: one leaf to whoever walks over weights."""
    return isinstance(x, LowRank | Merged | Quantized)


def lora_scale(rank: int, alpha: float | int, *, rank_stabilized: bool = False) -> float:
    """α/r, or α/√r when rank-stabilized."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)


def zero(key: KeyArray, w: Float[Array, "*l i o"] | Quantized, rank: int, scale: float) -> Factors:
    """A uniform in ±1/√in, B zero, float32: the base is the weight itself, and nothing changes."""
    *stack, i, o = w.shape
    bound = 1 / math.sqrt(i)
    a = jr.uniform(key, (*stack, i, rank), jnp.float32, -bound, bound)
    return Factors(w, a, jnp.zeros((*stack, rank, o), jnp.float32))


def pissa(key: KeyArray, w: Float[Array, "*l i o"] | Quantized, rank: int, scale: float) -> Factors:
    """A and B from the largest singular values, the base what is left: in sum the weight itself.

    A quantised base is quantised again, the same way; adapters first and `quantize` after them is
    closer to the weight.
    """
    dense = values_of(w)
    u, s, v = jnp.linalg.svd(dense, full_matrices=False)
    root = jnp.sqrt(s[..., :rank] / scale)
    a, b = u[..., :rank] * root[..., None, :], v[..., :rank, :] * root[..., None]
    left = dense - scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return Factors(like(w, left) if isinstance(w, Quantized) else left.astype(w.dtype), a, b)


def _override(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the last pattern found in the name, else the default."""
    found = [value for where, value in (pattern or {}).items() if re.search(where, name)]
    return found[-1] if found else default


def add_lora(
    model: Model,
    *,
    where: str = ALL_LINEAR,
    rank: int = 16,
    alpha: float | int = 32.0,
    key: KeyArray,
    rank_stabilized: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float | int] | None = None,
    dropout: float = 0.0,
    start: Start = zero,
    dora: bool = False,
) -> Model:
    """The model with adapters on every weight whose path the regular expression `where` finds a
    match in; on a quantised one, `add_lora(quantize(model))`, that is QLoRA.

    `ranks` and `alphas` override rank and alpha by path pattern; `start` is `zero` or `pissa`. The
    adapters are float32. Errors, before anything is computed: a pattern that matches nothing or
    something that is no matrix, a rank larger than the matrix, an adapter on an adapter.
    """
    found = set(tree.matching(model, where, is_kind))
    for pattern in (*(ranks or {}), *(alphas or {})):
        if not any(re.search(pattern, name) for name in found):
            raise ValueError(
                f"pattern {pattern!r} matches none of the adapted paths: {sorted(found)}"
            )
    if not 0 <= dropout < 1:
        raise ValueError(f"expected 0 ≤ dropout < 1, got {dropout}")
    wanted: dict[str, int] = {}
    for name, w in tree.named_leaves(model, is_kind):
        if name in found:
            check_matrix(name, w, where)
            wanted[name] = _checked_rank(name, w.shape, _override(ranks, name, rank))

    def wrap(name: str, w: Any) -> Any:
        if name not in wanted:
            return w
        r = wanted[name]
        scale = lora_scale(r, _override(alphas, name, alpha), rank_stabilized=rank_stabilized)
        base, a, b = start(tree.named_key(key, name), w, r, scale)
        # As long as they are already: what starts changes nothing.
        magnitude = jnp.linalg.norm(values_of(w), axis=-2) if dora else None
        return LowRank(base, a, b, scale, dropout, magnitude)

    return tree.map_named(wrap, model, is_kind)


def values_of(w: Float[Array, "*l i o"] | Quantized) -> Float[Array, "*l i o"]:
    """The numbers of a weight without an adapter, float32."""
    return w.dense(jnp.float32) if isinstance(w, Quantized) else w.astype(jnp.float32)


def check_matrix(name: str, w: Any, where: str) -> None:
    """Raise unless a leaf is a matrix, or a stack of them, without an adapter.

    In a stack of layers a norm's scale has two axes as well: its name tells.
    """
    if isinstance(w, LowRank | Merged):
        raise ValueError(f"{name} has an adapter already; merge it, or take another pattern")
    raw = eqx.is_inexact_array(w) and w.ndim >= 2 and not name.endswith(("norm", "bias"))
    if not (raw or isinstance(w, Quantized)):
        raise ValueError(f"expected matrices, but {where!r} matches {name}, which is none")


def _checked_rank(name: str, shape: tuple[int, ...], rank: int) -> int:
    *_, i, o = shape
    if not 1 <= rank <= min(i, o):
        raise ValueError(f"expected 1 ≤ rank ≤ {min(i, o)} for {name} [{i}, {o}], got {rank}")
    return rank
