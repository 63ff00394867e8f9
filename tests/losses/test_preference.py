"""Preference losses: worked values, float64 twins from the formulas, limits, extreme margins."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.losses import preference as p
from purepost.losses.preference import PairLogps
from purepost.mean import Spans

BETA = 0.3


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def sigma(x):
    return np.exp(log_sigmoid(x))


class Twin:
    """A pair in float64."""

    def __init__(self, pairs: PairLogps):
        c, r, rc, rr, self.n, self.m = (np.asarray(x, np.float64) for x in pairs)
        self.c, self.r = c, r
        self.a, self.b = c - rc, r - rr
        self.d = self.a - self.b
        self.avg = self.a / self.n - self.b / self.m


def discopop(t: Twin):
    x = BETA * t.d
    g = sigma(x / 0.05)
    return (1 - g) * -log_sigmoid(x) + g * np.exp(-x)


def exo(t: Twin):
    q, eps = sigma(BETA * t.d), 0.02
    return q * np.log(q / (1 - eps)) + (1 - q) * np.log((1 - q) / eps)


def orpo(t: Twin):
    c, r = np.exp(t.c / t.n), np.exp(t.r / t.m)
    return -BETA * log_sigmoid(np.log(c / (1 - c)) - np.log(r / (1 - r)))


def f_divergence(prime: Callable) -> Callable:
    return lambda t: -log_sigmoid(BETA * (prime(np.exp(t.a)) - prime(np.exp(t.b))))


LOSSES = {
    "sigmoid": (p.sigmoid, lambda t: -log_sigmoid(BETA * t.d)),
    "conservative": (
        partial(p.conservative, epsilon=0.2),
        lambda t: -0.8 * log_sigmoid(BETA * t.d) - 0.2 * log_sigmoid(-BETA * t.d),
    ),
    "robust": (
        partial(p.robust, epsilon=0.2),
        lambda t: (-0.8 * log_sigmoid(BETA * t.d) + 0.2 * log_sigmoid(-BETA * t.d)) / 0.6,
    ),
    "hinge": (p.hinge, lambda t: np.maximum(0.0, 1 - BETA * t.d)),
    "ipo": (p.ipo, lambda t: (t.avg - 1 / (2 * BETA)) ** 2),
    "exo_pair": (partial(p.exo_pair, epsilon=0.02), exo),
    "nca_pair": (
        p.nca_pair,
        lambda t: (
            -log_sigmoid(BETA * t.a)
            - 0.5 * log_sigmoid(-BETA * t.a)
            - 0.5 * log_sigmoid(-BETA * t.b)
        ),
    ),
    "bco_pair": (p.bco_pair, lambda t: -log_sigmoid(BETA * t.a) - log_sigmoid(-BETA * t.b)),
    "sppo_hard": (p.sppo_hard, lambda t: (t.a - 0.5 / BETA) ** 2 + (t.b + 0.5 / BETA) ** 2),
    "apo_zero": (p.apo_zero, lambda t: 1 - sigma(BETA * t.a) + sigma(BETA * t.b)),
    "apo_down": (p.apo_down, lambda t: sigma(BETA * t.a) + 1 - sigma(BETA * t.d)),
    "discopop": (p.discopop, discopop),
    "sigmoid_norm": (p.sigmoid_norm, lambda t: -log_sigmoid(BETA * t.avg)),
    "simpo": (partial(p.simpo, gamma=0.7), lambda t: -log_sigmoid(BETA * t.avg - 0.7)),
    "odds_ratio": (p.odds_ratio, orpo),
    "reverse_kl": (p.divergence(lambda x: x), f_divergence(np.log)),
    "forward_kl": (
        p.divergence(p.forward_kl),
        f_divergence(lambda u: -1 / np.maximum(u, np.exp(-20))),
    ),
    "jensen_shannon": (
        p.divergence(p.jensen_shannon),
        f_divergence(lambda u: np.log(2 * u / (1 + u))),
    ),
    "alpha_divergence": (
        p.divergence(p.alpha_divergence(0.3)),
        f_divergence(lambda u: (1 - u**-0.3) / 0.3),
    ),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def random_pairs(seed: int, n: int = 5) -> PairLogps:
    rng = np.random.default_rng(seed)
    totals = -rng.exponential(4.0, (4, n)) - 0.1
    lengths = rng.integers(1, 6, (2, n))
    return PairLogps(*(jnp.asarray(x, jnp.float32) for x in (*totals, *lengths)))


def one_pair(a: float, b: float = 0.0) -> PairLogps:
    """log-ratios a and b, of one token each."""
    x = [jnp.full(1, v, jnp.float32) for v in (a - 2, b - 2, -2, -2, 1, 1)]
    return PairLogps(*x)


@every_loss
@given(seed=st.integers(0, 2**32 - 1))
def test_every_loss_is_its_float64_twin(name, seed):
    loss, twin = LOSSES[name]
    pairs = random_pairs(seed)
    np.testing.assert_allclose(loss(pairs, beta=BETA), twin(Twin(pairs)), rtol=2e-4, atol=1e-5)


def test_forward_kl_where_the_policy_gave_a_completion_up():
    """A log-ratio of −24, beyond the e^20 that u goes to, and one of −19, short of it."""
    for a, most in ((-24.0, 20.0), (-19.0, 19.0)):
        got = p.divergence(p.forward_kl)(one_pair(a), beta=BETA)
        np.testing.assert_allclose(got, [BETA * np.exp(most) - BETA], rtol=2e-4)


@every_loss
@pytest.mark.parametrize("scale", [1e3, -1e3, 3e4, -3e4, 0.0])
def test_gradients_are_finite_at_extreme_margins(name, scale):
    loss, _ = LOSSES[name]
    length = jnp.full(2, 3.0)
    chosen, rejected = (jnp.minimum(jnp.asarray([s, s / 2]), 0.0) for s in (scale, -scale))

    def total(chosen, rejected):
        zero = jnp.zeros(2)
        return loss(PairLogps(chosen, rejected, zero, zero, length, length), beta=BETA).sum()

    value, grads = jax.value_and_grad(total, (0, 1))(chosen, rejected)
    assert np.isfinite(value)
    assert np.isfinite(jnp.stack(grads)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sigmoid", np.log(2)), ("conservative", np.log(2)), ("robust", np.log(2)), ("hinge", 1.0)]
    + [("apo_zero", 1.0), ("apo_down", 1.0), ("nca_pair", 2 * np.log(2))]
    + [("bco_pair", 2 * np.log(2)), ("sigmoid_norm", np.log(2)), ("forward_kl", np.log(2))],
)
def test_where_policy_and_reference_agree(name, value):
    np.testing.assert_allclose(LOSSES[name][0](one_pair(0.0), beta=BETA), [value], rtol=1e-6)


def test_worked_values():
    """βΔ = .3: sigmoid, and robust at ε .1; with the bare base as reference Δ is .3, β .1."""
    np.testing.assert_allclose(p.robust(one_pair(3.0)), [0.516855], rtol=1e-5)
    np.testing.assert_allclose(p.sigmoid(one_pair(0.3)), [0.678260], rtol=1e-5)
    # log(1 − p) at log p −1e-7 is −16.11810: odds of a nearly certain completion against even ones.
    sure = PairLogps(*(jnp.full(1, x) for x in (-1e-7, np.log(0.5), 0.0, 0.0, 1.0, 1.0)))
    loss = p.odds_ratio(sure, beta=1.0)
    np.testing.assert_allclose(loss, [np.log1p(np.exp(-16.11810))], rtol=1e-4)
    other = PairLogps(sure.rejected, sure.chosen, *sure[2:])
    np.testing.assert_allclose(p.odds_ratio(other, beta=1.0), [16.11810], rtol=1e-6)


@given(seed=st.integers(0, 2**32 - 1))
def test_limits_are_other_losses(seed):
    pairs = random_pairs(seed)
    plain = p.sigmoid(pairs, beta=BETA)
    for same in (
        p.conservative(pairs, beta=BETA, epsilon=0),
        p.robust(pairs, beta=BETA, epsilon=0),
        p.simpo(PairLogps(*pairs[:4], jnp.ones(5), jnp.ones(5)), beta=BETA, gamma=0),
    ):
        np.testing.assert_allclose(same, plain, rtol=1e-5, atol=1e-6)
    # The robust loss of labels that are flipped a fifth of the time is, on average, the true one.
    flipped = PairLogps(*(pairs[i] for i in (1, 0, 3, 2, 5, 4)))
    one, other = (p.robust(x, beta=BETA, epsilon=0.2) for x in (pairs, flipped))
    np.testing.assert_allclose(0.8 * one + 0.2 * other, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: p.robust(one_pair(1.0), epsilon=0.5),
        lambda: p.conservative(one_pair(1.0), epsilon=-0.1),
        lambda: p.exo_pair(one_pair(1.0), epsilon=0.0),
        lambda: p.discopop(one_pair(1.0), tau=0),
        lambda: p.alpha_divergence(1.0),
    ],
)
def test_numbers_out_of_range(broken):
    with pytest.raises(ValueError, match=r"expected 0 [<≤] (epsilon|tau|alpha) < \S+, got"):
        broken()


def pair_of(*columns: list[float]) -> PairLogps:
    chosen, rejected, length = (jnp.asarray(x, jnp.float32) for x in columns)
    zero = jnp.zeros_like(chosen)
    return PairLogps(chosen, rejected, zero, zero, length, length)


def test_wpo_weights():
    """Means −.5 and −1.5 nats: e^−2; above 1 (rounding) it is 1; no gradient."""
    pairs = pair_of([-1.0, 1e-6], [-3.0, 0.0], [2.0, 2.0])
    np.testing.assert_allclose(p.wpo_weights(pairs), [np.exp(-2), 1.0], rtol=1e-6)
    grad = jax.grad(lambda x: p.wpo_weights(pairs._replace(chosen=x)).sum())(pairs.chosen)
    np.testing.assert_array_equal(grad, [0.0, 0.0])


@given(seed=st.integers(0, 2**32 - 1))
def test_aot_pairs_margins_by_rank(seed):
    pairs, counts = random_pairs(seed), np.array([True, True, False, True, True])
    given_ref = p.sorted_reference(pairs, jnp.asarray(counts))
    policy = np.asarray(pairs.chosen - pairs.rejected)[counts]
    reference = np.asarray(pairs.ref_chosen - pairs.ref_rejected)[counts]
    expected = np.sort(policy) - np.sort(reference)
    got = policy - np.asarray(given_ref[:, 0] - given_ref[:, 1])[counts]
    np.testing.assert_allclose(np.sort(got), np.sort(expected), rtol=1e-5, atol=1e-5)
    order = np.argsort(policy)
    np.testing.assert_allclose(got[order], expected, rtol=1e-5, atol=1e-5)


def two_completions() -> tuple[jax.Array, Spans]:
    """A prompt, a completion of four tokens, one of two with an untrained token between."""
    mask = jnp.asarray([[0, 1, 1, 1, 1, 1, 0, 1]], bool)
    episode = jnp.asarray([[0, 0, 0, 0, 0, 1, 1, 1]])
    logps = jnp.asarray([[np.nan, -1.0, -2.0, -4.0, -8.0, -16.0, np.nan, -32.0]])
    return logps, Spans(mask, episode, jnp.ones((1, 2)))


@pytest.mark.parametrize(("beyond", "chosen"), [(1.0, -15.0), (0.5, -9.0), (0.0, -3.0)])
def test_tokens_beyond_the_shorter_length_count_less(beyond, chosen):
    logps, spans = two_completions()
    totals = p.completion_logps(logps, spans, beyond=beyond)
    np.testing.assert_allclose(totals, [[chosen, -48.0]])
    pairs = p.pair_logps(totals, None, spans)
    np.testing.assert_allclose(pairs.a, [chosen])
    np.testing.assert_array_equal([*pairs.chosen_length, *pairs.rejected_length], [4, 2])


def test_what_is_masked_has_no_gradient():
    logps, spans = two_completions()
    grad = jax.grad(lambda x: p.completion_logps(x, spans, beyond=0.5).sum())(logps)
    np.testing.assert_allclose(grad, [[0, 1, 1, 0.5, 0.5, 1, 0, 1]])


def test_metrics_do_not_count_what_has_no_weight():
    pairs = pair_of([1.0, 9.0], [-1.0, 9.0], [1.0, 1.0])
    pairs = pairs._replace(ref_chosen=jnp.full(2, -1.0))
    metrics = p.pair_metrics(pairs, jnp.asarray([1.0, 0.0]), beta=0.5)
    values = {name: float(m.value) for name, m in metrics.items()}
    assert values == {
        "rewards/chosen": 1.0,
        "rewards/rejected": -0.5,
        "rewards/accuracies": 1.0,
        "rewards/margins": 1.5,
        "logps/chosen": 1.0,
        "logps/rejected": -1.0,
    }


@given(seed=st.integers(0, 2**32 - 1))
def test_kto_twin(seed):
    rng = np.random.default_rng(seed)
    a, z, good = rng.normal(size=4), rng.exponential(size=4), rng.random(4) < 0.5
    got = p.kto(
        jnp.asarray(a, jnp.float32),
        jnp.asarray(good),
        jnp.asarray(z, jnp.float32),
        beta=BETA,
        desirable=1.5,
        undesirable=0.5,
    )
    up, down = 1.5 * (1 - sigma(BETA * (a - z))), 0.5 * (1 - sigma(BETA * (z - a)))
    np.testing.assert_allclose(got, np.where(good, up, down), rtol=1e-4, atol=1e-6)


def test_kto_has_no_gradient_through_z():
    x = jnp.ones(2)
    grad = jax.grad(lambda z: p.kto(x, jnp.asarray([True, False]), z).sum())(x)
    np.testing.assert_array_equal(grad, [0.0, 0.0])
