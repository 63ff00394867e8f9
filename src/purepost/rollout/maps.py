"""A student's attention maps against a teacher's, a chunk of trained tokens' queries at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..models.trace import Heads
from ..types import Rows
from .divergence import Divergence
from .trained import CHUNK, Trained

LEAST = 1e-30  # a share of attention whose logarithm is finite


def compare_maps(
    student: Heads,
    teacher: Heads,
    rows: Rows,
    divergence: Divergence,
    *,
    groups: int | None = None,
    chunk: int = CHUNK,
) -> Float[Array, "b t"]:
    """How far the student's attention is from the teacher's where each trained token is predicted
    from, the mean over heads; 0 elsewhere.

    Heads are compared one by one, or with `groups` as that many means of neighbouring heads. The
    backward pass computes a chunk's maps again. Errors: numbers of heads that do not fit; layers
    of two windows.
    """
    both = (student, teacher)
    counts = [x.queries.shape[2] for x in both]
    wanted = counts[0] if groups is None else groups
    if any(count % wanted for count in counts) or (groups is None and counts[0] != counts[1]):
        raise ValueError(
            f"expected maps of {wanted} heads, or of multiples of `heads`, got {counts[0]} of the "
            f"student's and {counts[1]} of the teacher's; pass `heads`, a number that divides both"
        )
    if student.window != teacher.window:
        raise ValueError(
            "expected layers whose queries see as far back, got windows of "
            f"{student.window} and {teacher.window} tokens; pair other layers"
        )
    trained = Trained.of(rows, chunk)
    shapes = [x.queries.shape for x in both]
    queries = [x.queries.reshape(*shape[:2], -1) for x, shape in zip(both, shapes, strict=True)]

    @jax.checkpoint
    def one(x: Any) -> Float[Array, "b q"]:
        index, *parts = x
        maps = [
            _grouped(heads.log_maps(rows, part.reshape(*index.shape, *shape[2:]), index), wanted)
            for heads, part, shape in zip(both, parts, shapes, strict=True)
        ]
        return divergence(jax.lax.stop_gradient(maps[1]), maps[0]).mean(1)

    parts = [trained.chunks(trained.gather(q)) for q in queries]
    return trained.back(jax.lax.map(one, (trained.chunks(trained.parent), *parts)))


def _grouped(maps: Float[Array, "b h q t"], groups: int) -> Float[Array, "b g q t"]:
    """The means of the maps of neighbouring heads, maps and means as logarithms."""
    b, h, q, t = maps.shape
    if h == groups:
        return maps
    mean = jnp.exp(maps).reshape(b, groups, h // groups, q, t).mean(2)
    seen = jnp.isfinite(maps[:, :1])
    return jnp.where(seen, jnp.log(jnp.maximum(mean, LEAST)), -jnp.inf)
