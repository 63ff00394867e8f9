"""Nash Mirror Descent: towards the policy that no other is preferred to.

y ~ π    y' ~ π^{1−α} π_ref^α, normalised at each token
L = −(P(y ≻ y') − ½) log π(y) + β KL(π‖π_ref)        mean over prompts

Source: Munos et al., Nash Learning from Human Feedback, 2312.00886 (Nash-MD-PG). Differs from the
paper: the KL is ½(log π(y)/π_ref(y))², whose gradient is the reverse KL's; log π_ref is taken
in the rollout.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, PyTree

from ..algorithm import Algorithm, TrainState, make_init, make_update
from ..losses.limits import expect
from ..losses.preference import weighted_mean
from ..mean import Metrics, Terms, masked_mean
from ..models.containers import WithReference, policy_trainable
from ..models.decoder import Decoder
from ..rollout.collect import Reward, Tasks
from ..rollout.draw import Sampling
from ..rollout.mixture import generate_mixture
from ..rollout.sample import Completions, generate
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar, group_rows

Models = WithReference[Decoder]
# (tasks, ours, theirs) → the probability that ours is preferred, NaN where it is not known
Prefer = Callable[[Tasks, Completions, Completions], tuple[Float[Array, " p"], Metrics]]


class NashBatch(eqx.Module):
    """A completion in each row. Log-probabilities in nats, summed over tokens."""

    rows: Rows
    weights: Float[Array, " b"]  # 0: the row does not count
    advantages: Float[Array, " b"]
    ref_logps: Float[Array, " b"]


class ByReward(eqx.Module):
    """A preference model from a reward, by Bradley and Terry: P = σ(r(y) − r(y'))."""

    reward: Reward

    def __call__(
        self, tasks: Tasks, ours: Completions, theirs: Completions
    ) -> tuple[Float[Array, " p"], Metrics]:
        """The probability that ours is preferred."""
        (own, metrics), (other, _) = self.reward(tasks, ours), self.reward(tasks, theirs)
        chance = jax.nn.sigmoid(own - other)[:, 0]
        return chance, metrics | {"reward": masked_mean(own, jnp.isfinite(own))}


def nash_md(
    optimizer: optax.GradientTransformation,
    prefer: Prefer,
    sampling: Sampling,
    *,
    alpha: Scalar = 0.5,
    beta: Scalar = 0.1,
    trainable: Callable[[Models], PyTree] = policy_trainable,
    microbatches: int = 1,
) -> Algorithm[Models, Tasks, NashBatch]:
    """Nash-MD; `alpha` is the reference's share in the opponent. Errors: numbers out of range; a
    reference that is missing; a temperature of 0.
    """
    expect("alpha", alpha, 0.0, 1.0, or_low=True, or_high=True)
    expect("beta", beta, 0.0, or_low=True)
    expect("temperature", sampling.temperature, 0.0)

    def totals(model: Decoder, rows: Rows) -> tuple[Float[Array, " b"], Any]:
        at = jnp.full(rows.ids.shape, sampling.temperature, jnp.float32)
        scores = score(model, rows, temperature=at)
        return scores.logps.sum(1), scores.entropies

    def rollout(key: KeyArray, state: TrainState[Models], data: Tasks) -> tuple[NashBatch, Metrics]:
        models, prompts = state.models, data.prompts
        if models.reference is None:
            raise ValueError("expected a reference, got none; pass with_reference(policy)")
        k_own, k_other = jr.split(key)
        own = generate(k_own, models.policy, prompts, sampling)
        other = generate_mixture(
            k_other, models.policy, models.reference, prompts, sampling, share=alpha
        )
        chance, metrics = prefer(data, own, other)
        known = jnp.isfinite(chance)
        rows = group_rows(
            prompts.tokens, prompts.lengths, own.tokens, own.lengths, own.mask, ids=prompts.ids
        )
        ref_logps, _ = eqx.filter_jit(totals)(models.reference, rows)
        advantages = jnp.where(known, chance - 0.5, 0.0)
        batch = NashBatch(rows, known.astype(jnp.float32), advantages, ref_logps)
        return batch, metrics | {"win_rate": masked_mean(chance, known)}

    def loss(key: KeyArray, models: Models, batch: NashBatch) -> tuple[Terms, Metrics]:
        logps, entropies = totals(models.policy, batch.rows)
        kl = weighted_mean((logps - batch.ref_logps) ** 2 / 2, batch.weights)
        terms = {
            "policy": weighted_mean(-batch.advantages * logps, batch.weights),
            "kl": kl.times(beta),
        }
        return terms, {"entropy": masked_mean(entropies, batch.rows.mask)}

    update = make_update(optimizer, microbatches=microbatches)
    return Algorithm(make_init(optimizer, trainable=trainable), rollout, loss, update)
