"""Distillations of what is inside a model: losses against float64 twins, refusals, the average of a
student's past.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import distillations, tiny
from experiments.probes.probe import CONFIG
from purepost import train
from purepost.algorithms import (
    attention_transfer,
    feature_pooling,
    feature_projection,
    self_distillation,
)
from purepost.algorithms.feature_projection import with_projections
from purepost.algorithms.self_distillation import Hinted, Views, own_completions
from purepost.losses.distillation import cosine_distance, of_probabilities, reverse_kl
from purepost.models import init_decoder
from purepost.models.containers import Distill
from purepost.models.decoder import Decoder
from purepost.models.trace import Heads, trace
from purepost.rollout.draw import Sampling
from purepost.rollout.maps import compare_maps
from purepost.rollout.sample import pad_prompts
from purepost.rollout.score import score
from purepost.types import Rows, group_rows

SGD = optax.sgd(0.1)


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Two prompts with two completions each: of 4, 2, 1 and 3 trained tokens."""
    rng = np.random.default_rng(0)
    tokens = lambda *shape: jnp.asarray(rng.integers(3, 12, shape), jnp.int32)  # noqa: E731
    lengths = jnp.asarray([[4, 2], [1, 3]], jnp.int32)
    mask = jnp.arange(4) < lengths[..., None]
    return group_rows(tokens(2, 3), jnp.asarray([3, 2], jnp.int32), tokens(2, 2, 4), lengths, mask)


@pytest.fixture(scope="module")
def larger() -> Distill[Decoder]:
    """A student of two layers, two heads and one key head; a teacher of three, four and two."""
    config = replace(CONFIG, num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2)
    return Distill(tiny(lora=False), init_decoder(jr.key(7), config))


def losses(algorithm: Any, models: Any, rows: Any) -> dict[str, float]:
    """The terms and metrics of the loss."""
    terms, metrics = eqx.filter_jit(algorithm.loss)(jr.key(0), models, rows)
    found = metrics | {f"term {name}": mean for name, mean in terms.items()}
    return {name: float(mean.value) for name, mean in found.items()}


def trained(rows: Rows) -> list[tuple[int, int]]:
    """(row, index of the token before) of every trained token."""
    return [(b, int(rows.parent[b, t])) for b, t in zip(*np.nonzero(rows.mask), strict=True)]


def mean_over(rows: Rows, far: Callable[[int, int], float]) -> float:
    """The mean of a distance at the tokens from which trained ones are predicted."""
    return float(np.mean([far(b, i) for b, i in trained(rows)]))


def nll(model: Decoder, rows: Rows) -> float:
    return float(-score(model, rows).logps.sum() / rows.mask.sum(dtype=jnp.float32))


def maps_of(heads: Heads, rows: Rows, b: int, i: int, groups: int) -> np.ndarray:
    """[groups, what token i sees], in float64 from the definition."""
    q, k, end = (np.asarray(x[b], np.float64) for x in (heads.queries, heads.keys, rows.end))
    seen = [j for j in range(len(end)) if j <= i < end[j]]
    share = q.shape[1] // k.shape[1]
    scores = np.array([[q[i, h] @ k[j, h // share] for j in seen] for h in range(q.shape[1])])
    maps = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return maps.reshape(groups, -1, len(seen)).mean(1)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(-1)


def divergence_of(
    own: list[Heads], other: list[Heads], rows: Rows, groups: int, twin: Callable[..., Any]
) -> float:
    """The mean over trained tokens, pairs of layers and groups of heads."""

    def far(b: int, i: int) -> float:
        maps = [(maps_of(t, rows, b, i, groups), maps_of(s, rows, b, i, groups)) for s, t in pairs]
        return float(np.mean([twin(t, s) for t, s in maps]))

    pairs = list(zip(own, other, strict=True))
    return mean_over(rows, far)


def test_attention_transfer_is_the_kl_of_maps(larger: Distill[Decoder], rows: Rows) -> None:
    """Two pairs of layers, four heads as two means against two; α .6, c .5 of values."""
    layers = ((0, 1), (-1, -1))
    own = list(trace(larger.student, rows, heads=[0, 1]).heads)
    other = list(trace(larger.teacher, rows, heads=[1, 2]).heads)
    got = losses(attention_transfer(SGD, layers=layers, heads=2, alpha=0.6), larger, rows)
    want = divergence_of(own, other, rows, 2, kl)
    assert want > 1e-3 and "values" not in got
    assert got["attention"] == pytest.approx(want, rel=1e-4)
    assert got["term attention"] == pytest.approx(0.6 * want, rel=1e-4)
    assert got["term nll"] == pytest.approx(0.4 * nll(larger.student, rows), rel=1e-4)
    backwards = attention_transfer(
        SGD, layers=layers, heads=1, alpha=0.6, values=0.5, divergence=reverse_kl
    )
    got, twin = losses(backwards, larger, rows), lambda t, s: kl(s, t)
    want = divergence_of(own, other, rows, 1, twin)
    assert got["attention"] == pytest.approx(want, rel=1e-4)
    own, other = ([x.relations for x in heads] for heads in (own, other))
    want = divergence_of(own, other, rows, 1, twin)
    assert got["values"] == pytest.approx(want, rel=1e-3)
    assert got["term values"] == pytest.approx(0.6 * 0.5 * want, rel=1e-3)


def test_maps_as_vectors_of_length_one(rows: Rows) -> None:
    """Zagoruyko & Komodakis's squared distance is twice the cosine distance; chunks of any size."""
    models = distillations.with_even_attention(tiny(lora=False))
    (own,), (other,) = (trace(m, rows, heads=(-1,)).heads for m in (models.student, models.teacher))

    def twin(t: np.ndarray, s: np.ndarray) -> np.ndarray:
        units = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (t, s)]
        return ((units[0] - units[1]) ** 2).sum(-1) / 2

    want = divergence_of([own], [other], rows, 2, twin)
    for chunk in (2, 6, 256):
        far = compare_maps(own, other, rows, of_probabilities(cosine_distance), chunk=chunk)
        assert not np.asarray(far)[~np.asarray(rows.mask)].any()
        assert float(far.sum() / rows.mask.sum(dtype=jnp.float32)) == pytest.approx(want, rel=1e-4)


def test_feature_pooling_is_the_angle_of_pooled_states(
    larger: Distill[Decoder], rows: Rows
) -> None:
    """24 features to 16: windows of two, one shared, by the formula; layers 0, 1 with 1, 2."""
    got = losses(feature_pooling(SGD), larger, rows)
    own = trace(larger.student, rows, states=[0, 1]).states
    other = trace(larger.teacher, rows, states=[1, 2]).states

    def far(b: int, i: int) -> float:
        found = []
        for s, t in zip(own, other, strict=True):
            a, wide = (np.asarray(x[b, i], np.float64) for x in (s, t))
            bounds = [(i * 24 // 16, -(-(i + 1) * 24 // 16)) for i in range(16)]
            pooled = np.array([wide[low:high].mean() for low, high in bounds])
            found.append(1 - a @ pooled / np.linalg.norm(a) / np.linalg.norm(pooled))
        return float(np.mean(found))

    want = mean_over(rows, far)
    assert got["features"] == pytest.approx(want, rel=1e-4)
    assert got["term features"] == pytest.approx(0.75 * want, rel=1e-4)
    assert got["term nll"] == pytest.approx(0.25 * nll(larger.student, rows), rel=1e-4)
    turned = losses(feature_pooling(SGD), Distill(larger.teacher, larger.student), rows)
    assert 0 < turned["features"] < 2


def test_feature_projection_is_the_error_of_projected_states(
    larger: Distill[Decoder], rows: Rows
) -> None:
    """A projection for each pair; the gradient reaches all of them, and no teacher."""
    models = with_projections(jr.key(3), larger, [(0, 0), (-1, -1)])
    assert models.layers == ((0, 0), (1, 2)) and models.projections.shape == (2, 16, 24)
    algorithm = feature_projection(SGD)
    got = losses(algorithm, models, rows)
    own = trace(larger.student, rows, states=[0, 1]).states
    other = trace(larger.teacher, rows, states=[0, 2]).states

    def far(b: int, i: int) -> float:
        found = []
        for s, t, w in zip(own, other, models.projections, strict=True):
            a, wanted, w = (np.asarray(x, np.float64) for x in (s[b, i], t[b, i], w))
            found.append(((a @ w - wanted) ** 2).mean())
        return float(np.mean(found))

    assert got["features"] == pytest.approx(mean_over(rows, far), rel=1e-4)
    state = algorithm.init(jr.key(0), models)
    assert not jax.tree.leaves(state.params.teacher)
    _, state, _ = next(train(algorithm, state, lambda step: rows, key=jr.key(0), steps=1))
    assert (np.abs(state.models.projections - models.projections).max((1, 2)) > 0).all()


def test_a_teacher_is_the_average_of_its_students_past() -> None:
    """d = .75: after two steps .75 (.75 θ0 + .25 θ1) + .25 θ2; nothing else of it moves."""
    model = tiny(lora=False)
    algorithm = self_distillation(SGD, decay=0.75)
    state = algorithm.init(jr.key(0), Distill(model, model))
    want = np.asarray(model.embed, np.float64)
    for _, new, metrics in train(algorithm, state, distillations.views(0), key=jr.key(0), steps=2):
        student = np.asarray(new.params.student.embed, np.float64)
        assert np.abs(student - want).max() > 1e-4 and float(metrics["skipped"].value) == 0
        want = 0.75 * want + 0.25 * student
        np.testing.assert_allclose(new.models.teacher.embed, want, rtol=1e-5, atol=1e-6)


def test_a_teacher_may_be_told_more_than_its_student() -> None:
    """Own completions: the same trained tokens behind two prompts; the loss is the reverse KL of
    what each says there.
    """
    model = tiny(lora=False)
    prompts = pad_prompts([[3, 4], [5]], width=2)
    hinted = Hinted(prompts, pad_prompts([[8, 9, 3, 4], [7, 5]], width=4))
    algorithm = self_distillation(
        SGD,
        rollout=own_completions(Sampling(max_tokens=3), group=2),
        divergence=reverse_kl,
        alpha=1.0,
    )
    state = algorithm.init(jr.key(0), Distill(model, model))
    views, metrics = algorithm.rollout(jr.key(1), state, hinted)
    assert float(metrics["completions/mean_length"].value) == 3
    told = views.teacher_rows
    assert told is not None and told.tokens.shape == (2, 10)
    for b in range(2):
        own, other = (np.asarray(r.tokens[b])[np.asarray(r.mask[b])] for r in (views.rows, told))
        np.testing.assert_array_equal(own, other)
    got = losses(algorithm, state.models, views)

    def says(r: Rows, b: int) -> np.ndarray:
        index = np.asarray(r.parent[b])[np.asarray(r.mask[b])]
        logits = np.asarray(model.unembed(model(r)[0][b, index]), np.float64)
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    want = np.mean([kl(says(views.rows, b), says(told, b)) for b in range(2)])
    assert got["term divergence"] == pytest.approx(want, rel=1e-4) and want > 1e-3
    assert got["term nll"] == 0
    same = losses(algorithm, state.models, Views(views.rows))
    assert same["divergence"] == pytest.approx(0, abs=1e-6)


BUILDS: list[tuple[Callable[[], Any], str]] = [
    (lambda: attention_transfer(SGD, layers=()), "at least one pair"),
    (lambda: attention_transfer(SGD, heads=0), "1 ≤ heads"),
    (lambda: attention_transfer(SGD, values=-1.0), "0 ≤ values"),
    (lambda: attention_transfer(SGD, alpha=1.5), "alpha ≤ 1"),
    (lambda: feature_pooling(SGD, layers=()), "at least one pair"),
    (lambda: feature_pooling(SGD, alpha=-0.5), "0 ≤ alpha"),
    (lambda: feature_projection(SGD, alpha=2), "alpha ≤ 1"),
    (lambda: self_distillation(SGD, decay=1.0), "decay < 1"),
    (lambda: self_distillation(SGD, temperature=0), "0 < temperature"),
    (lambda: own_completions(Sampling(max_tokens=3), group=0), "group ≥ 1"),
]


@pytest.mark.parametrize(("build", "message"), BUILDS)
def test_what_is_out_of_range_is_an_error(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_models_that_do_not_fit_are_an_error(larger: Distill[Decoder], rows: Rows) -> None:
    """At the first trace: heads, layers, windows, vocabularies; another structure."""
    with pytest.raises(ValueError, match="got 2 of the student's and 4 of the teacher's"):
        losses(attention_transfer(SGD), larger, rows)
    with pytest.raises(ValueError, match="maps of 3 heads"):
        losses(attention_transfer(SGD, heads=3), larger, rows)
    with pytest.raises(ValueError, match="layers from -2 to 1, got 2"):
        losses(feature_pooling(SGD, layers=((2, 2),)), larger, rows)
    short = init_decoder(jr.key(0), replace(CONFIG, windows=(2, 2)))
    pair = Distill(short, tiny(lora=False))
    with pytest.raises(ValueError, match="windows of 2 and None tokens"):
        losses(attention_transfer(SGD), pair, rows)
    other = Distill(short, init_decoder(jr.key(0), replace(CONFIG, vocab_size=13)))
    for algorithm in (attention_transfer(SGD), feature_pooling(SGD)):
        with pytest.raises(ValueError, match="student's 12 tokens, got 13"):
            losses(algorithm, other, rows)
    with pytest.raises(ValueError, match="student's 12 tokens, got 13"):
        with_projections(jr.key(0), other)
    alone = self_distillation(SGD)
    state = alone.init(jr.key(0), larger)
    with pytest.raises(ValueError, match="models of one structure"):
        eqx.filter_eval_shape(alone.update, alone.loss, jr.key(0), state, Views(rows))
