"""A student against a teacher over the whole vocabulary, a chunk of trained tokens at a time."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..types import KeyArray, LanguageModel, Rows, Scalar
from .trained import CHUNK, Trained

# (teacher, student) log-probabilities → nats
Divergence = Callable[[Float[Array, "*s v"], Float[Array, "*s v"]], Float[Array, "*s"]]


@jax.custom_vjp
def _weight(w: Array, sums: Float[Array, "*s"]) -> Array:
    """w, whose gradient goes to `sums`: chunk by chunk it is added up there in float32."""
    return w


_weight.defvjp(lambda w, _: (w, None), lambda _, g: (None, g.astype(jnp.float32)))


@jax.custom_vjp
def _sums(w: Array) -> Float[Array, "*s"]:
    """Zeros in float32, whose gradient is w's."""
    return jnp.zeros(w.shape)


_sums.defvjp(lambda w: (_sums(w), w), lambda w, g: (g.astype(w.dtype),))


class Comparison(eqx.Module):
    """Of every trained token; 0 elsewhere. Nats."""

    divergences: Float[Array, "b t"]
    logps: Float[Array, "b t"]  # the student's, at temperature 1
    teacher_logps: Float[Array, "b t"]  # the teacher's
    entropies: Float[Array, "b t"]  # the student's, at `temperature`


def compare(
    student: LanguageModel,
    teacher: LanguageModel,
    rows: Rows,
    divergence: Divergence,
    *,
    temperature: Scalar = 1.0,
    teacher_rows: Rows | None = None,
    key: KeyArray | None = None,
    chunk: int = CHUNK,
) -> Comparison:
    """How far the student is from the teacher at every trained token, both at `temperature`.

    No gradient reaches the teacher. `teacher_rows` are what the teacher reads, where it is not what
    the student does: as many trained tokens, in the same order. `key` turns the student's dropout
    on. The backward pass computes a chunk's logits again. Error: vocabularies of two sizes.
    """
    trained = Trained.of(rows, chunk)
    others = rows if teacher_rows is None else teacher_rows
    seen = Trained.of(others, chunk, trained.capacity)
    hidden = trained.gather(student(rows, key=key)[0])
    context = seen.gather(teacher(others)[0])
    weights, rest = eqx.partition(student.unembed, eqx.is_inexact_array)
    judge, sums = teacher.unembed, jax.tree.map(_sums, weights)

    @jax.checkpoint
    def one(x: Any) -> tuple[Array, ...]:
        h, c, target = x
        own = jax.tree.map(_weight, jax.lax.stop_gradient(weights), sums)
        unembed: Any = eqx.combine(own, rest)
        logits, wanted = unembed(h), jax.lax.stop_gradient(judge(c))
        if logits.shape != wanted.shape:
            raise ValueError(
                f"expected a teacher of the student's {logits.shape[-1]} tokens, got "
                f"{wanted.shape[-1]}; restrict the larger vocabulary first: "
                "models.vocabulary.restrict"
            )
        given = jax.nn.log_softmax(logits / temperature)
        far = divergence(jax.nn.log_softmax(wanted / temperature), given)
        p = jnp.exp(given)
        entropy = -jnp.where(p > 0, p * jnp.where(p > 0, given, 0.0), 0.0).sum(-1)
        logps, others = (
            jnp.take_along_axis(jax.nn.log_softmax(x), target[..., None], -1)[..., 0]
            for x in (logits, wanted)
        )
        return far, logps, others, entropy

    parts = trained.chunks(hidden), trained.chunks(context), trained.chunks(trained.targets)
    return Comparison(*map(trained.back, jax.lax.map(one, parts)))
