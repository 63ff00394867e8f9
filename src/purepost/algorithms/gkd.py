"""Generalised Knowledge Distillation: on the student's own completions, or on given ones.

With probability λ a prompt is followed by a completion that the student samples, else by the given
one;  L = Σ_t m_t JSD_β(teacher, student) / Σ_t m_t. No gradient passes through the sampling.

Source: Agarwal et al., On-policy distillation of language models, 2306.13649, algorithm 1. Differs
from the paper: the choice is each prompt's own, not the whole step's.
"""

from collections.abc import Callable
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Bool, Int, PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses import Aggregate, token_mean
from ..losses.distillation import Divergence, jensen_shannon
from ..losses.limits import expect
from ..mean import Metrics, Terms, mean_of, spans_of
from ..models.containers import Distill, student_trainable
from ..models.decoder import Decoder
from ..rollout.divergence import compare
from ..rollout.draw import Sampling
from ..rollout.sample import Prompts, generate
from ..types import KeyArray, Rows, Scalar, group_rows

Models = Distill[Decoder]


class Demonstrations(eqx.Module):
    """Prompts with a given completion each, padded on the right."""

    prompts: Prompts
    tokens: Int[Array, "p t"]
    lengths: Int[Array, " p"]


def gkd(
    optimizer: optax.GradientTransformation,
    sampling: Sampling,
    *,
    divergence: Divergence = jensen_shannon(0.5),  # noqa: B008
    on_policy: Scalar = 0.5,
    aggregate: Aggregate = token_mean,
    trainable: Callable[[Models], PyTree] = student_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Models, Demonstrations, Rows]:
    """The student towards the teacher on completions of which a share `on_policy` (λ) is its own.

    `steps`: epochs, minibatches, microbatches, as of make_update. Errors: λ outside [0, 1]; at
    the first step, given completions longer than the sampled ones may be.
    """
    expect("on_policy", on_policy, 0.0, 1.0, or_low=True, or_high=True)

    @eqx.filter_jit
    def rollout(
        key: KeyArray, state: TrainState[Models], data: Demonstrations
    ) -> tuple[Rows, Metrics]:
        k_sample, k_choose = jr.split(key)
        own = generate(k_sample, state.models.student, data.prompts, sampling)
        room = own.tokens.shape[-1] - data.tokens.shape[1]
        if room < 0:
            raise ValueError(
                f"expected given completions of at most {own.tokens.shape[-1]} tokens, the "
                f"sampling's limit, got room for {data.tokens.shape[1]}; cut them or raise it"
            )
        keys = jax.vmap(lambda i: jr.fold_in(k_choose, i))(data.prompts.ids)
        chosen: Bool[Array, " p"] = jax.vmap(lambda k: jr.uniform(k) < on_policy)(keys)
        given = jnp.pad(data.tokens, [(0, 0), (0, room)])
        tokens = jnp.where(chosen[:, None], own.tokens[:, 0], given)
        lengths = jnp.where(chosen, own.lengths[:, 0], data.lengths)
        mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
        rows = group_rows(
            data.prompts.tokens,
            data.prompts.lengths,
            tokens[:, None],
            lengths[:, None],
            mask[:, None],
            ids=data.prompts.ids,
        )
        return rows, {"on_policy": mean_of(chosen.astype(jnp.float32))}

    def loss(key: KeyArray, models: Models, batch: Rows) -> tuple[Terms, Metrics]:
        found = compare(models.student, models.teacher, batch, divergence, key=key)
        spans = spans_of(batch)
        return {"divergence": aggregate(found.divergences, spans)}, {
            "nll": aggregate(-found.logps, spans)
        }

    return Algorithm(
        make_init(optimizer, trainable=trainable),
        rollout,
        loss,
        make_update(optimizer, **steps),
    )
