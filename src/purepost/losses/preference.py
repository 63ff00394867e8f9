"""Losses of preferences, one number per pair, to be minimised.

a and b are log π/π_ref of the chosen and the rejected completion, summed over their tokens, nats;
Δ = a − b. Without a reference they are log π itself. β scales them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..mean import Mean, Metrics, Spans, select
from ..types import Scalar
from .limits import expect

MOST = 20.0  # nats: e^x beyond it says nothing and soon overflows
NEAREST = 1e-8  # nats: how near 0 a mean log-probability may come, where log(1 − p) has a slope


class PairLogps(NamedTuple):
    """n pairs. Log-probabilities are sums over a completion's tokens, nats; lengths in tokens."""

    chosen: Float[Array, " n"]
    rejected: Float[Array, " n"]
    ref_chosen: Float[Array, " n"]
    ref_rejected: Float[Array, " n"]
    chosen_length: Float[Array, " n"]
    rejected_length: Float[Array, " n"]

    @property
    def a(self) -> Float[Array, " n"]:
        """log π/π_ref of the chosen completion."""
        return self.chosen - self.ref_chosen

    @property
    def b(self) -> Float[Array, " n"]:
        """log π/π_ref of the rejected completion."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Float[Array, " n"]:
        """Δ."""
        return self.a - self.b

    @property
    def mean_margin(self) -> Float[Array, " n"]:
        """Δ of log-ratios averaged over each completion's tokens."""
        return _mean(self.a, self.chosen_length) - _mean(self.b, self.rejected_length)


@runtime_checkable
class Preference(Protocol):
    """(pairs, β) → a loss for each pair."""

    def __call__(self, pairs: PairLogps, /, *, beta: Scalar) -> Float[Array, " n"]:
        """The losses, to be averaged."""
        ...


def _mean(total: Float[Array, " n"], length: Float[Array, " n"]) -> Float[Array, " n"]:
    return total / jnp.maximum(length, 1.0)


def completion_logps(
    logps: Float[Array, "b t"], spans: Spans, *, beyond: Scalar = 1.0
) -> Float[Array, "b e"]:
    """Σ_t log π of every completion; with `beyond` < 1 its tokens past the length of the row's
    shortest count that much less.

    Source: Liu et al., LD-DPO, 2409.06411.
    """
    member = spans.episode[:, :, None] == jnp.arange(spans.weights.shape[1])
    member &= spans.mask[:, :, None]
    counted = jnp.cumsum(member.astype(jnp.float32), 1)  # from 1 on in each completion
    number = jnp.where(member, counted, 0.0).sum(-1)
    shared = number <= spans.lengths.min(-1, keepdims=True)
    return spans.sum(select(spans.mask, logps) * jnp.where(shared, 1.0, beyond))


def pair_logps(
    logps: Float[Array, "b 2"], ref_logps: Float[Array, "b 2"] | None, spans: Spans
) -> PairLogps:
    """Rows whose episode 0 is the chosen completion and 1 the rejected one, as pairs."""
    ref = jnp.zeros_like(logps) if ref_logps is None else ref_logps
    return PairLogps(*logps.T, *ref.T, *spans.lengths.T)


def weighted_mean(x: Float[Array, " n"], weights: Float[Array, " n"]) -> Mean:
    """Σ w x / Σ w."""
    return Mean((x * weights).sum(), weights.sum())


def pair_metrics(pairs: PairLogps, weights: Float[Array, " n"], *, beta: Scalar) -> Metrics:
    """Implicit rewards β log π/π_ref and log-probabilities, under the field's names."""
    values = {
        "rewards/chosen": beta * pairs.a,
        "rewards/rejected": beta * pairs.b,
        "rewards/accuracies": (pairs.margin > 0).astype(jnp.float32),
        "rewards/margins": beta * pairs.margin,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }
    return {name: weighted_mean(x, weights) for name, x in values.items()}


def sigmoid(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """−log σ(βΔ). Source: Rafailov et al., DPO, 2305.18290, eq. 7."""
    return -jax.nn.log_sigmoid(beta * pairs.margin)


def conservative(
    pairs: PairLogps, *, beta: Scalar = 0.1, epsilon: Scalar = 0.1
) -> Float[Array, " n"]:
    """(1 − ε)(−log σ(βΔ)) + ε(−log σ(−βΔ)), 0 ≤ ε < ½: labels are wrong with probability ε.

    Source: Mitchell, A note on DPO with noisy preferences, 2023 (cDPO).
    """
    expect("epsilon", epsilon, 0.0, 0.5, or_low=True)
    x = beta * pairs.margin
    return -(1 - epsilon) * jax.nn.log_sigmoid(x) - epsilon * jax.nn.log_sigmoid(-x)


def robust(pairs: PairLogps, *, beta: Scalar = 0.1, epsilon: Scalar = 0.1) -> Float[Array, " n"]:
    """((1 − ε)(−log σ(βΔ)) − ε(−log σ(−βΔ)))/(1 − 2ε), 0 ≤ ε < ½: the loss of the true labels in
    expectation, where labels are wrong with probability ε.

    Source: Chowdhury et al., Provably Robust DPO, 2403.00409.
    """
    expect("epsilon", epsilon, 0.0, 0.5, or_low=True)
    x = beta * pairs.margin
    right, wrong = -jax.nn.log_sigmoid(x), -jax.nn.log_sigmoid(-x)
    return ((1 - epsilon) * right - epsilon * wrong) / (1 - 2 * epsilon)


def hinge(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """max(0, 1 − βΔ). Source: Zhao et al., SLiC-HF, 2305.10425, eq. 1, with log-ratios."""
    return jax.nn.relu(1 - beta * pairs.margin)


def ipo(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """(Δ̄ − 1/(2β))², Δ̄ of length-averaged log-ratios, where the paper has sums.

    Source: Azar et al., IPO, 2310.12036, eq. 17.
    """
    return (pairs.mean_margin - 1 / (2 * beta)) ** 2


def exo_pair(pairs: PairLogps, *, beta: Scalar = 0.1, epsilon: Scalar = 1e-3) -> Float[Array, " n"]:
    """KL((q, 1 − q)‖(1 − ε, ε)), q = σ(βΔ), 0 < ε < ½.

    Source: Ji et al., EXO, 2402.00856, eq. 16.
    """
    expect("epsilon", epsilon, 0.0, 0.5)
    x = beta * pairs.margin
    log_q, log_p = jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)
    won = jnp.exp(log_q) * (log_q - jnp.log1p(-epsilon))
    return won + jnp.exp(log_p) * (log_p - jnp.log(epsilon))


def nca_pair(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """−log σ(βa) − ½ log σ(−βa) − ½ log σ(−βb). Source: Chen et al., NCA, 2402.05369."""
    a, b = beta * pairs.a, beta * pairs.b
    down = jax.nn.log_sigmoid(-a) + jax.nn.log_sigmoid(-b)
    return -jax.nn.log_sigmoid(a) - 0.5 * down


def bco_pair(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """−log σ(βa) − log σ(−βb), without the paper's shift of the reward.

    Source: Jung et al., BCO, 2404.04656.
    """
    return -jax.nn.log_sigmoid(beta * pairs.a) - jax.nn.log_sigmoid(-beta * pairs.b)


def sppo_hard(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """(a − ½/β)² + (b + ½/β)²: the chosen one wins with probability 1.

    Source: Wu et al., SPPO, 2405.00675, eq. 4.7.
    """
    return (pairs.a - 0.5 / beta) ** 2 + (pairs.b + 0.5 / beta) ** 2


def apo_zero(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """1 − σ(βa) + σ(βb): the chosen one up, the rejected one down.

    Source: D'Oosterlinck et al., APO, 2408.06266, eq. 7.
    """
    return jax.nn.sigmoid(-beta * pairs.a) + jax.nn.sigmoid(beta * pairs.b)


def apo_down(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """σ(βa) + 1 − σ(βΔ): both down, the rejected one more.

    Source: D'Oosterlinck et al., APO, 2408.06266, eq. 8.
    """
    return jax.nn.sigmoid(beta * pairs.a) + jax.nn.sigmoid(-beta * pairs.margin)


def discopop(pairs: PairLogps, *, beta: Scalar = 0.1, tau: Scalar = 0.05) -> Float[Array, " n"]:
    """(1 − g)(−log σ(βΔ)) + g e^{−βΔ}, g = σ(βΔ/τ). Source: Lu et al., DiscoPOP, 2406.08414,
    eq. 5.
    """
    expect("tau", tau, 0.0, 1.0)  # from 1 on the second part grows without bound
    x = beta * pairs.margin
    logistic = jax.nn.sigmoid(-x / tau) * -jax.nn.log_sigmoid(x)
    return logistic + jnp.exp(jax.nn.log_sigmoid(x / tau) - x)


def sigmoid_norm(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """−log σ(βΔ̄), Δ̄ of length-averaged log-ratios. Source: Lambert et al., Tülu 3, 2411.15124."""
    return -jax.nn.log_sigmoid(beta * pairs.mean_margin)


def simpo(pairs: PairLogps, *, beta: Scalar = 2.0, gamma: Scalar = 1.0) -> Float[Array, " n"]:
    """−log σ(βΔ̄ − γ), of pairs without reference. Source: Meng et al., SimPO, 2405.14734, eq. 6."""
    return -jax.nn.log_sigmoid(beta * pairs.mean_margin - gamma)


Derivative = Callable[[Float[Array, " n"]], Float[Array, " n"]]


def divergence(derivative: Derivative) -> Preference:
    """−log σ(β(f'(u_c) − f'(u_r))), u = π/π_ref, with f' as a function of log u: what holds the
    policy at its reference is the divergence of f.

    Source: Wang et al., Beyond Reverse KL, 2309.16240.
    """

    def loss(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
        return -jax.nn.log_sigmoid(beta * (derivative(pairs.a) - derivative(pairs.b)))

    return loss


def forward_kl(log_ratio: Float[Array, " n"]) -> Float[Array, " n"]:
    """f' of KL(π_ref‖π): −1/u, u within e^−20."""
    return -jnp.exp(jnp.minimum(-log_ratio, MOST))


def jensen_shannon(log_ratio: Float[Array, " n"]) -> Float[Array, " n"]:
    """f' of the Jensen–Shannon divergence: log(2u/(1 + u))."""
    return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)


def alpha_divergence(alpha: float) -> Derivative:
    """f' of the α-divergence: (1 − u^{−α})/α, 0 < α < 1, u^{−α} up to e^20."""
    expect("alpha", alpha, 0.0, 1.0)
    return lambda log_ratio: -jnp.expm1(jnp.minimum(-alpha * log_ratio, MOST)) / alpha


def odds_ratio(pairs: PairLogps, *, beta: Scalar = 0.1) -> Float[Array, " n"]:
    """−β log σ(log odds(c) − log odds(r)), odds = p/(1 − p), log p the mean log-probability.

    Source: Hong et al., ORPO, 2403.07691, eq. 7; β is its λ. log(1 − p) is log(−expm1(log p)).
    """

    def log_odds(total: Float[Array, " n"], length: Float[Array, " n"]) -> Float[Array, " n"]:
        logp = jnp.minimum(_mean(total, length), -NEAREST)
        return logp - jnp.log(-jnp.expm1(logp))

    chosen = log_odds(pairs.chosen, pairs.chosen_length)
    rejected = log_odds(pairs.rejected, pairs.rejected_length)
    return -beta * jax.nn.log_sigmoid(chosen - rejected)


def wpo_weights(pairs: PairLogps) -> Float[Array, " n"]:
    """min(1, exp(mean log π_c + mean log π_r)), held constant: how near a pair is to what the
    policy itself would say.

    Source: Zhou et al., WPO, 2406.11827, eq. 2.
    """
    chosen = _mean(pairs.chosen, pairs.chosen_length)
    rejected = _mean(pairs.rejected, pairs.rejected_length)
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(chosen + rejected, 0.0)))


def sorted_reference(pairs: PairLogps, counts: Bool[Array, " n"]) -> Float[Array, "n 2"]:
    """AOT: each pair gets the reference margin of its policy margin's rank among those that count.
    As a reference's (chosen, rejected), of which only the difference has a meaning.

    Source: Melnyk et al., Distributional Preference Alignment of LLMs via Optimal Transport,
    2406.05882.
    """
    last = jnp.inf
    order = jnp.argsort(jnp.where(counts, pairs.chosen - pairs.rejected, last), stable=True)
    margins = jnp.sort(jnp.where(counts, pairs.ref_chosen - pairs.ref_rejected, last))
    given = jnp.zeros_like(margins).at[order].set(margins)
    return jnp.stack([jnp.where(counts, given, 0.0), jnp.zeros_like(given)], -1)


def kto(
    log_ratios: Float[Array, " n"],
    good: Bool[Array, " n"],
    z: Float[Array, " n"],
    *,
    beta: Scalar = 0.1,
    desirable: Scalar = 1.0,
    undesirable: Scalar = 1.0,
) -> Float[Array, " n"]:
    """λ_D(1 − σ(β(a − z))) for a good completion, λ_U(1 − σ(β(z − a))) for another; a is its
    log π/π_ref, z the point that gain and loss are felt from.

    Source: Ethayarajh et al., KTO, 2402.01306.
    """
    gain = beta * (log_ratios - jax.lax.stop_gradient(z))
    return jnp.where(good, desirable * jax.nn.sigmoid(-gain), undesirable * jax.nn.sigmoid(gain))
