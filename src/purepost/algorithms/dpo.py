"""Direct Preference Optimization, with any loss of `losses.preference` in its place.

a = log π(y_c) − log π_ref(y_c)    b = log π(y_r) − log π_ref(y_r)        summed over tokens
L = −log σ(β(a − b))               mean over pairs

Source: Rafailov et al., 2305.18290, eq. 7. Differs from the paper:
1. Any loss of a pair's log-probabilities may stand in for the sigmoid's, with weights (WPO), an
   NLL of the chosen completion beside it (RPO, 2404.19733), fewer of the longer completion's
   tokens (LD-DPO, 2409.06411), or no reference at all.
2. The reference is scored once, in the rollout; it may move (TR-DPO, 2404.09656).
3. Neither model is run with dropout.
"""

from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..losses.limits import expect
from ..losses.preference import (
    PairLogps,
    Preference,
    completion_logps,
    pair_logps,
    pair_metrics,
    sigmoid,
    weighted_mean,
)
from ..mean import Mean, Metrics, Spans, Terms, masked_mean
from ..models.containers import WithReference, policy_trainable
from ..models.decoder import Decoder
from ..rollout.labelled import Pairs
from ..rollout.score import score
from ..types import KeyArray, Rows, Scalar

Models = WithReference[Decoder]
Couple = Callable[[PairLogps, Bool[Array, " n"]], Float[Array, "n 2"]]
After = Callable[[KeyArray, TrainState[Models], Metrics], TrainState[Models]]


class PairBatch(eqx.Module):
    """A pair in each row. Log-probabilities in nats, summed over tokens."""

    rows: Rows
    weights: Float[Array, " b"]  # 0: the row does not count
    ref_logps: Float[Array, "b 2"] | None = None  # of chosen and rejected
    bonus: Float[Array, "b 2"] | None = None  # the loss also has Σ bonus · log π

    @property
    def spans(self) -> Spans:
        """The two completions of every row."""
        weights = jnp.stack([self.weights] * 2, -1)
        return Spans(self.rows.mask, self.rows.episode, weights)


@eqx.filter_jit
def annotate(
    models: Models, batch: PairBatch, beyond: Scalar, temperature: Scalar, couple: Couple | None
) -> PairBatch:
    """The batch with the reference's log-probabilities, and what `couple` makes of them."""
    at = jnp.full(batch.weights.shape, temperature, jnp.float32)

    def logps(model: Any) -> Float[Array, "b 2"]:
        tokens = score(model, batch.rows, temperature=at).logps
        return completion_logps(tokens, batch.spans, beyond=beyond)

    ref_logps = logps(models.reference)
    if couple is not None:
        pairs = pair_logps(logps(models.policy), ref_logps, batch.spans)
        ref_logps = couple(pairs, batch.weights > 0)
    return PairBatch(batch.rows, batch.weights, ref_logps)


class Options(Steps, total=False):
    """The keyword arguments of `dpo`, as its variants hand them on."""

    beta: Scalar
    loss: Preference
    weigh: Callable[[PairLogps], Float[Array, " n"]] | None
    nll: Scalar
    beyond: Scalar
    temperature: Scalar
    reference: bool
    couple: Couple | None
    after: After | None
    trainable: Callable[[Models], PyTree]


def dpo(
    optimizer: optax.GradientTransformation,
    *,
    beta: Scalar = 0.1,
    loss: Preference = sigmoid,
    weigh: Callable[[PairLogps], Float[Array, " n"]] | None = None,
    nll: Scalar = 0.0,
    beyond: Scalar = 1.0,
    temperature: Scalar = 1.0,
    reference: bool = True,
    couple: Couple | None = None,
    after: After | None = None,
    trainable: Callable[[Models], PyTree] = policy_trainable,
    **steps: Unpack[Steps],
) -> Algorithm[Models, Pairs, PairBatch]:
    """DPO on rows of two completions. `nll` weighs the NLL of the chosen ones, nats per token;
    `beyond` the tokens past the shorter one's length; `couple` replaces the reference's part, given
    the whole batch (AOT: `sorted_reference`). Error: a reference that is missing.
    """
    _check(loss, beta, nll, beyond, temperature)

    def rollout(key: KeyArray, state: TrainState[Models], data: Pairs) -> tuple[PairBatch, Metrics]:
        models, batch = state.models, PairBatch(data.rows, data.real.astype(jnp.float32))
        if reference and models.reference is None:
            raise ValueError("expected a reference, got none; pass with_reference(policy)")
        return annotate(models, batch, beyond, temperature, couple) if reference else batch, {}

    def pair_loss(key: KeyArray, models: Models, batch: PairBatch) -> tuple[Terms, Metrics]:
        at = jnp.full(batch.weights.shape, temperature, jnp.float32)
        scores = score(models.policy, batch.rows, temperature=at)
        logps = completion_logps(scores.logps, batch.spans, beyond=beyond)
        pairs = pair_logps(logps, batch.ref_logps, batch.spans)
        losses = loss(pairs, beta=beta) * (1.0 if weigh is None else weigh(pairs))
        terms = {"preference": weighted_mean(losses, batch.weights)}
        if eqx.is_array(nll) or nll:
            chosen = batch.spans.sum(scores.logps)[:, 0]
            tokens = pairs.chosen_length * batch.weights
            terms["nll"] = Mean(-nll * (chosen * batch.weights).sum(), tokens.sum())
        if batch.bonus is not None:
            terms["bonus"] = weighted_mean((batch.bonus * logps).sum(-1), batch.weights)
        metrics = pair_metrics(pairs, batch.weights, beta=beta)
        metrics["entropy"] = masked_mean(scores.entropies, batch.rows.mask)
        return terms, metrics

    update = make_update(optimizer, after=after, **steps)
    return Algorithm(make_init(optimizer, trainable=trainable), rollout, pair_loss, update)


def _check(
    loss: Preference, beta: Scalar, nll: Scalar, beyond: Scalar, temperature: Scalar
) -> None:
    expect("beta", beta, 0.0)
    expect("nll", nll, 0.0, or_low=True)
    expect("beyond", beyond, 0.0, 1.0, or_low=True, or_high=True)
    expect("temperature", temperature, 0.0)
    # A loss checks its own numbers where it is called.
    jax.eval_shape(lambda x: loss(PairLogps(x, x, x, x, x, x), beta=beta), jnp.ones(1))
