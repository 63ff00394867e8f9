"""Experts against a loop over tokens in float64; products by group; the load-balancing loss."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.models import load_balancing_loss, real_tokens
from purepost.models.moe import MoE, SideExperts
from purepost.tree import map_named, named_leaves
from purepost.types import causal_rows
from purepost.weights import add_lora, grouped_linear, merge

D, F, E, CHOSEN = 5, 7, 4, 2


def array(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def experts(seed: int = 0) -> MoE:
    rng = np.random.default_rng(seed)
    shapes = ((D, E), (E, D, F), (E, D, F), (E, F, D))
    return MoE(*(array(rng, *shape) for shape in shapes))


def twin(
    moe: MoE, x: np.ndarray, *, normalize: bool, routed: np.ndarray | None = None
) -> np.ndarray:
    """Token by token, expert by expert."""
    routed = x if routed is None else routed
    scale = np.ones(E) if moe.scale is None else np.asarray(moe.scale, np.float64)
    router, gate, up, down = (
        np.asarray(w, np.float64) for w in (moe.router, moe.gate, moe.up, moe.down)
    )
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        scores = np.exp(routed[at] @ router)
        p = scores / scores.sum()
        chosen = np.argsort(-p)[:CHOSEN]
        total = p[chosen].sum() if normalize else 1.0
        for e in chosen:
            g = x[at] @ gate[e]
            out[at] += (
                scale[e] * p[e] / total * ((g / (1 + np.exp(-g)) * (x[at] @ up[e])) @ down[e])
            )
    return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_token_gets_its_experts(tokens: int, normalize: bool) -> None:
    """Fewer choices than experts, and more."""
    moe, x = experts(), array(np.random.default_rng(1), 2, tokens, D)
    run = jax.jit(lambda m, x: m(x, jax.nn.silu, CHOSEN, normalize=normalize))
    out, probabilities = run(moe, x)
    want = twin(moe, np.asarray(x, np.float64), normalize=normalize)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, rtol=1e-6)


def test_experts_beside_an_mlp() -> None:
    """norm(MLP) + norm(experts(norm x)), each expert times a number of its own; the router reads
    the stream by a norm of its own, over √d.
    """
    rng = np.random.default_rng(10)
    moe = replace(experts(), scale=array(rng, E))
    before, router, after, of_mlp = norms = [array(rng, D) for _ in range(4)]
    side = SideExperts(before, router, moe, after, of_mlp)
    x, y = array(rng, 2, 3, D), array(rng, 2, 3, D)
    out, _ = jax.jit(lambda s, x, y: s(x, y, jax.nn.silu, CHOSEN, 1e-3))(side, x, y)

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale

    x, y, before, router, after, of_mlp = (np.asarray(z, np.float64) for z in (x, y, *norms))
    inner = twin(moe, normed(x, before), normalize=True, routed=normed(x, router) / D**0.5)
    want = normed(y, of_mlp) + normed(inner, after)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


def test_the_gradient_equals_the_twins_slope() -> None:
    moe, way = experts(2), experts(3)
    x = array(np.random.default_rng(4), 1, 6, D)
    weights = np.random.default_rng(5).normal(size=(1, 6, D))

    def loss(moe: MoE) -> jax.Array:
        out, _ = moe(x, jax.nn.silu, CHOSEN, normalize=True)
        return (out * weights.astype(np.float32)).sum()

    def moved(step: float) -> float:
        at = jax.tree.map(lambda a, b: np.asarray(a, np.float64) + step * np.asarray(b), moe, way)
        return float((twin(at, np.asarray(x, np.float64), normalize=True) * weights).sum())

    products = jax.tree.map(lambda a, b: float((a * b).sum()), jax.jit(jax.grad(loss))(moe), way)
    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=1e-3)


grouped = jax.jit(grouped_linear)


@given(st.lists(st.integers(0, 12), min_size=12, max_size=12), st.integers(0, 99))
def test_products_by_group(cuts: list[int], seed: int) -> None:
    """Any sizes, empty groups among them: 12 rows in 4 groups."""
    rng = np.random.default_rng(seed)
    sizes = np.bincount(np.asarray(cuts) % 4, minlength=4)
    x, w = array(rng, 12, 3), array(rng, 4, 3, 2)
    got = grouped(x, w, jnp.asarray(sizes, jnp.int32))
    owners = np.repeat(np.arange(4), sizes)
    want = np.einsum("ni,nio->no", np.asarray(x, np.float64), np.asarray(w, np.float64)[owners])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_adapted_experts_equal_merged_ones() -> None:
    """An adapter of its own for each expert; dropout at 1/2 depends on the row's key only."""
    model = {"mlp": experts(6)}
    adapted = add_lora(
        model, where=r"mlp\.(gate|up|down|router)$", rank=2, key=jr.key(0), dropout=0.5
    )
    noise = np.random.default_rng(7)
    adapted = map_named(lambda n, x: array(noise, *x.shape) if n.endswith(".b") else x, adapted)
    assert dict(named_leaves(adapted))["mlp.gate.a"].shape == (E, D, 2)
    x = array(np.random.default_rng(8), 3, 4, D)
    run = jax.jit(lambda m, x, key: m["mlp"](x, jax.nn.silu, CHOSEN, normalize=True, key=key)[0])
    np.testing.assert_allclose(
        run(adapted, x, None), run(merge(adapted), x, None), rtol=1e-3, atol=1e-4
    )
    keys = jr.split(jr.key(1), 3)
    dropped, turned = run(adapted, x, keys), run(adapted, x[::-1], keys[::-1])
    assert np.abs(dropped - run(adapted, x, None)).max() > 0.01
    np.testing.assert_allclose(turned[::-1], dropped, rtol=1e-4, atol=1e-5)


def test_an_even_load_costs_the_number_of_experts_chosen() -> None:
    """Tokens that choose the pairs (0,1), (2,3) in turn, with even probabilities else."""
    p = np.full((1, 1, 4, E), 0.2, np.float32)
    p[0, 0, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 0, 1, 2, 3]] = 0.3
    even = load_balancing_loss(jnp.asarray(p), jnp.ones((1, 4), bool), 2)
    assert float(even) == pytest.approx(2.0, rel=1e-6)
    one = np.zeros((2, 1, 4, E), np.float32)
    one[..., 0] = 1.0
    all_on_one = load_balancing_loss(jnp.asarray(one), jnp.ones((1, 4), bool), 1)
    assert float(all_on_one) == pytest.approx(E, rel=1e-6)


def test_padding_does_not_count() -> None:
    rng = np.random.default_rng(9)
    p = np.asarray(jax.nn.softmax(array(rng, 2, 2, 5, E)))
    rows = causal_rows(jnp.zeros((2, 5), jnp.int32), jnp.asarray([5, 2], jnp.int32))
    real = real_tokens(rows)
    assert real.tolist() == [[True] * 5, [True, True, False, False, False]]
    other = p.copy()
    other[:, 1, 2:] = np.nan
    losses = [load_balancing_loss(jnp.asarray(x), real, CHOSEN) for x in (p, other)]
    assert losses[0] == losses[1]
    zeros = jax.tree.map(jnp.zeros_like, rows)
    assert not real_tokens(zeros).any()
    assert float(load_balancing_loss(jnp.asarray(p), real_tokens(zeros), CHOSEN)) == 0.0
