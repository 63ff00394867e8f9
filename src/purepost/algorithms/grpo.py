"""Group Relative Policy Optimization.

A_i = (r_i − mean(r)) / (std(r) + ε)        over the G completions of one prompt
ρ_it = π(y_it) / π_old(y_it)
L = −Σ_i 1/T_i Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) / B + β KL(π‖π_ref)

Source: Shao et al., DeepSeekMath, 2402.03300, eq. 3. Differs from the paper:
1. β is 0 unless asked for, and the reference model is then not run.
2. The KL estimator is k3·ρ, whose gradient is that of the reverse KL; k3's is the forward KL's.
3. With one optimizer step per rollout, π_old is π itself held constant: ρ = 1 exactly, and no
   scoring pass is spent on it.
4. Completions that could not be scored leave the group's statistics and the loss.

Most policy gradients are this file with other functions: advantage × objective × aggregate ×
correction × filters × kl.
"""

from collections.abc import Callable, Sequence
from functools import partial

import equinox as eqx
import optax
from jaxtyping import PyTree

from ..advantages import Advantage, Refine, group_normalized
from ..algorithm import Algorithm, Steps, TrainState, make_init, make_update
from ..filters import Filter
from ..losses import (
    KL,
    Aggregate,
    Correction,
    Objective,
    check_kl,
    clipped,
    k3_weighted,
    sequence_mean,
)
from ..losses.limits import expect
from ..mean import Metrics, Terms, masked_mean
from ..models.containers import WithReference, policy_trainable
from ..models.decoder import Decoder
from ..policy_batch import PolicyBatch, annotate, check_parts
from ..rollout.collect import Collect, Lay, Tasks, to_rows
from ..rollout.score import score
from ..types import KeyArray, Scalar

Models = WithReference[Decoder]


class Options(Steps, total=False):
    """The keyword arguments of `grpo`, as its variants hand them on."""

    advantage: Advantage
    refine: Refine | None
    objective: Objective
    aggregate: Aggregate
    correction: Correction | None
    filters: Sequence[Filter]
    kl: KL
    beta: Scalar
    entropy: Scalar
    lay: Lay
    trainable: Callable[[Models], PyTree]


def grpo(
    optimizer: optax.GradientTransformation,
    collect: Collect,
    *,
    advantage: Advantage = group_normalized,
    refine: Refine | None = None,
    objective: Objective = clipped,
    aggregate: Aggregate = sequence_mean,
    correction: Correction | None = None,
    filters: Sequence[Filter] = (),
    kl: KL = k3_weighted,
    beta: Scalar = 0.0,
    entropy: Scalar = 0.0,
    lay: Lay = to_rows,
    trainable: Callable[[Models], PyTree] = policy_trainable,
    epochs: int = 1,
    minibatches: int = 1,
    microbatches: int = 1,
) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO over the episodes of `collect`: a row for each prompt, its group behind it.

    `correction` weighs tokens by π_old/π_sampler; `filters` say which episodes count. `beta` weighs
    the KL to `models.reference`, `entropy` a bonus (nats per token). `lay` lays episodes into rows:
    `Packed()` packs them, `partial(to_rows, per_row=2)` splits groups. Errors: groups of one,
    `beta` without a reference.
    """
    check_parts(collect, advantage, objective, aggregate, lay)
    check_kl(kl)
    expect("beta", beta, 0.0, or_low=True)
    update = make_update(
        optimizer, epochs=epochs, minibatches=minibatches, microbatches=microbatches
    )
    reused = epochs * minibatches > 1
    held, curious = (eqx.is_array(c) or bool(c != 0) for c in (beta, entropy))
    annotated = partial(annotate, refine=refine, filters=tuple(filters), lay=lay)

    def rollout(
        key: KeyArray, state: TrainState[Models], data: Tasks
    ) -> tuple[PolicyBatch, Metrics]:
        episodes, metrics = collect(key, state.models.policy, data)
        batch, more = annotated(state.models, episodes, advantage, old=reused, reference=held)
        return batch, more | metrics

    def loss(key: KeyArray, models: Models, batch: PolicyBatch) -> tuple[Terms, Metrics]:
        scores = score(models.policy, batch.rows, temperature=batch.temperature)
        logps, old, spans = scores.logps, batch.held(scores.logps), batch.spans
        losses, metrics = batch.surrogate(logps, objective, correction)
        terms = {"policy": aggregate(losses, spans)}
        if held and batch.ref_logps is not None:
            metrics["kl"] = aggregate(kl(logps, old, batch.ref_logps, spans), spans)
            terms["kl"] = metrics["kl"].times(beta)
        if curious:
            terms["entropy"] = aggregate(scores.entropies, spans).times(-entropy)
        metrics["entropy"] = masked_mean(scores.entropies, spans.mask)
        return terms, metrics

    return Algorithm(make_init(optimizer, trainable=trainable), rollout, loss, update)
