"""Algorithms of preferences: the reference, what moves it, what does not count, bad input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from experiments.probes import tiny
from experiments.probes.preferences import judged, paired
from experiments.probes.probe import LORA
from experiments.probes.sampled import goal_share, tasks
from purepost import train
from purepost.algorithms import dpo, kto, orpo, simpo, xpo
from purepost.follow import follow
from purepost.losses import preference
from purepost.models.containers import WithReference, with_reference
from purepost.models.decoder import Decoder
from purepost.rollout.collect import Episodes, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.labelled import Judged, Pairs, beside_the_next, best_and_worst
from purepost.rollout.sample import pad_prompts
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows, check_rows
from purepost.weights import add_lora, without_lora
from tests.compare import assert_same_bits

DPO = dpo(optax.sgd(0.1), beta=0.5)


def trained_adapter() -> Decoder:
    """A policy whose adapter gives something."""
    model = tiny(lora=True)
    return jax.tree.map(lambda x: x + 0.1 if eqx.is_inexact_array(x) else x, model)


def first_loss(algorithm, models, data):
    state = algorithm.init(jr.key(0), models)
    batch, _ = algorithm.rollout(jr.key(1), state, data)
    return algorithm.loss(jr.key(2), state.models, batch)


@pytest.mark.parametrize("policy", [tiny(lora=True), trained_adapter()], ids=["new", "trained"])
def test_the_first_loss_is_ln_2_with_adapters_and_dropout(policy):
    """Adapters that are 0, and one that was trained before (against the bare base it is not)."""
    terms, metrics = first_loss(DPO, with_reference(policy), paired(0)(0))
    np.testing.assert_allclose(terms["preference"].value, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(metrics["rewards/margins"].value, 0.0, atol=1e-6)
    bare = WithReference(policy, without_lora(policy))
    terms, _ = first_loss(DPO, bare, paired(0)(0))
    moved = bool(jnp.any(policy.layers.attention.q.b != 0))
    assert (abs(float(terms["preference"].value) - np.log(2)) > 1e-3) == moved


def test_rows_that_fill_a_batch_up_do_not_count():
    data = paired(0)(0)
    half = Pairs(data.rows, data.margins, jnp.arange(4) < 2)
    models = WithReference(tiny(lora=False), tiny(lora=False, seed=3))
    two = jax.tree.map(lambda x: x[:2], data)
    found, expected = (first_loss(DPO, models, x) for x in (half, two))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found[0], expected[0])
    for name in ("rewards/chosen", "logps/rejected", "rewards/accuracies"):
        np.testing.assert_allclose(found[1][name].value, expected[1][name].value, rtol=1e-5)


def test_the_loss_is_the_formula_of_scored_completions():
    """Twin: each completion scored alone in a row of its own."""
    data = paired(0)(0)
    policy, reference = tiny(lora=False), tiny(lora=False, seed=3)
    prompts, branches = data.rows.tokens[:2, :2], data.rows.tokens[:2, 2:].reshape(2, 2, 3)
    lengths, sizes = ([1, 2], [[2, 1], [1, 2]])
    deltas = []
    for row in range(2):
        ratios = []
        for branch in range(2):
            p, c = lengths[row], sizes[row][branch]
            ids = jnp.concatenate([prompts[row, :p], branches[row, branch, :c]])[None]
            rows = causal_rows(ids, jnp.asarray([p + c]), jnp.arange(p + c)[None] >= p)
            totals = [float(score(model, rows).logps.sum()) for model in (policy, reference)]
            ratios.append(totals[0] - totals[1])
        deltas.append(ratios[0] - ratios[1])
    terms, metrics = first_loss(DPO, WithReference(policy, reference), data)
    np.testing.assert_allclose(metrics["rewards/margins"].value, 0.5 * np.mean(deltas), rtol=1e-4)
    expected = np.logaddexp(0, -0.5 * np.asarray(deltas)).mean()
    np.testing.assert_allclose(terms["preference"].value, expected, rtol=1e-4)


def test_without_reference_none_is_needed_and_with_one_it_must_be_there():
    alone = WithReference(tiny(lora=False))
    first_loss(dpo(optax.sgd(0.1), reference=False), alone, paired(0)(0))
    with pytest.raises(ValueError, match="expected a reference, got none"):
        first_loss(DPO, alone, paired(0)(0))
    with pytest.raises(ValueError, match="expected a reference, got none"):
        first_loss(kto(optax.sgd(0.1)), alone, judged(0)(0))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_reference_that_follows(share):
    """Every second step it becomes that share of the policy."""
    after = follow(lambda m: m.policy, lambda m: m.reference, every=2, share=share)
    algorithm = dpo(optax.sgd(0.1), after=after)
    policy = tiny(lora=False)
    start = algorithm.init(jr.key(0), WithReference(policy, policy))
    loop = train(algorithm, start, paired(0), key=jr.key(0), steps=2)
    assert_same_bits(next(loop)[1].models.reference, policy)
    _, state, _ = next(loop)
    new, old, reference = state.models.policy.embed, policy.embed, state.models.reference
    expected = share * np.asarray(new) + (1 - share) * np.asarray(old)
    assert reference is not None
    np.testing.assert_allclose(reference.embed, expected, rtol=1e-6, atol=1e-7)
    assert (new != old).any()


def test_a_reference_of_another_structure_cannot_follow():
    after = follow(lambda m: m.policy, lambda m: m.reference)
    algorithm = dpo(optax.sgd(0.1), after=after)
    state = algorithm.init(jr.key(0), with_reference(tiny(lora=True)))
    with pytest.raises(ValueError, match="one structure"):
        next(train(algorithm, state, paired(0), key=jr.key(0), steps=1))
    copy = add_lora(tiny(lora=False), **LORA, key=jr.key(1))
    state = algorithm.init(jr.key(0), WithReference(copy, copy))
    _, state, _ = next(train(algorithm, state, paired(0), key=jr.key(0), steps=1))
    assert_same_bits(state.models.reference, state.models.policy)


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda o: dpo(o, beta=0.0), "0 < beta"),
        (lambda o: dpo(o, beyond=1.5), "0 ≤ beyond ≤ 1"),
        (lambda o: dpo(o, nll=-1), "0 ≤ nll"),
        (lambda o: dpo(o, temperature=0), "0 < temperature"),
        (lambda o: dpo(o, loss=lambda p, beta: preference.robust(p, epsilon=0.5)), "0 ≤ epsilon"),
        (lambda o: dpo(o, loss=lambda p, beta: preference.exo_pair(p, epsilon=0)), "0 < epsilon"),
        (lambda o: simpo(o, gamma=-1.0), "0 ≤ gamma"),
        (lambda o: orpo(o, beta=-1), "0 < beta"),
        (lambda o: kto(o, desirable=-1), "0 ≤ desirable"),
        (lambda o: follow(lambda m: m, lambda m: m, share=0), "0 < share"),
    ],
)
def test_numbers_out_of_range_are_refused_when_the_factory_builds(build, what):
    with pytest.raises(ValueError, match=what):
        build(optax.sgd(0.1))


def rows_of(sequences: list[list[int]], begins: list[int], ids: list[int]) -> Rows:
    width = 6
    tokens = np.zeros((len(sequences), width), np.int32)
    for row, ids_of in zip(tokens, sequences, strict=True):
        row[: len(ids_of)] = ids_of
    mask = np.arange(width) >= np.asarray(begins)[:, None]
    return causal_rows(
        jnp.asarray(tokens),
        jnp.asarray([len(s) for s in sequences]),
        jnp.asarray(mask),
        ids=jnp.asarray(ids, jnp.int32),
    )


SEQUENCES, BEGINS, IDS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 2, 1]], [2, 1, 4], [5, 9, 7]
NEXT = [2, 0, 1]  # of the row ids 5, 9, 7: 5 → 7 → 9 → 5


def test_each_prompt_meets_the_completion_of_the_next_row():
    rows = rows_of(SEQUENCES, BEGINS, IDS)
    wide, differs = beside_the_next(rows, jnp.ones(3, bool))
    check_rows(wide)
    assert differs.all()
    model = tiny(lora=False)
    both = score(model, wide).logps
    for row, other in enumerate(NEXT):
        begin, completion = BEGINS[row], SEQUENCES[other][BEGINS[other] :]
        plain = rows_of([SEQUENCES[row][:begin] + completion], [begin], [0])
        expected = score(model, plain).logps[0, begin : begin + len(completion)]
        got = both[row, 6 : 6 + len(completion)]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        own = score(model, jax.tree.map(lambda x, row=row: x[row : row + 1], rows)).logps
        np.testing.assert_allclose(both[row, :6], own[0], rtol=1e-4, atol=1e-5)
        assert int(wide.mask[row, 6:].sum()) == len(completion)


def test_z_is_the_mean_over_mismatched_pairs_in_any_order():
    rows = rows_of([*SEQUENCES, [1]], [*BEGINS, 1], [*IDS, 1])
    good, real = jnp.asarray([True, False, True, True]), jnp.asarray([True, True, True, False])
    policy, reference = tiny(lora=False, seed=4), tiny(lora=False)
    algorithm = kto(optax.sgd(0.1), beta=0.5)
    state = algorithm.init(jr.key(0), WithReference(policy, reference))
    data = Judged(rows, good, real)
    batch, metrics = algorithm.rollout(jr.key(1), state, data)
    ratios = []
    for row, other in enumerate(NEXT):
        begin = BEGINS[row]
        plain = rows_of([SEQUENCES[row][:begin] + SEQUENCES[other][BEGINS[other] :]], [begin], [0])
        totals = [float(score(model, plain).logps.sum()) for model in (policy, reference)]
        ratios.append(totals[0] - totals[1])
    np.testing.assert_allclose(metrics["kl"].value, np.mean(ratios), rtol=1e-3)
    np.testing.assert_allclose(batch.z, max(np.mean(ratios), 0.0), rtol=1e-3)
    order = jnp.asarray([3, 1, 0, 2])
    moved, _ = algorithm.rollout(jr.key(1), state, jax.tree.map(lambda x: x[order], data))
    np.testing.assert_allclose(moved.z, batch.z, rtol=1e-5)
    np.testing.assert_allclose(moved.ref_logps, batch.ref_logps[order], rtol=1e-5, atol=1e-5)


def test_one_row_has_no_other_to_be_paired_with():
    algorithm = kto(optax.sgd(0.1))
    state = algorithm.init(jr.key(0), with_reference(tiny(lora=False)))
    one = jax.tree.map(lambda x: x[:1], judged(0)(0))
    with pytest.raises(ValueError, match="at least 2 rows"):
        algorithm.rollout(jr.key(1), state, one)
    # Nor does the only row that counts: z is then 0.
    lonely = Judged(judged(0)(0).rows, judged(0)(0).good, jnp.arange(4) == 1)
    batch, metrics = algorithm.rollout(jr.key(1), state, lonely)
    assert float(metrics["kl"].weight) == 0
    np.testing.assert_array_equal(batch.z, np.zeros(4))


def episodes(rewards: list[float]) -> Episodes:
    """Two prompts, of which the completions stand in turn: A, B, A, B, A, B."""
    n = len(rewards)
    return Episodes(
        prompts=pad_prompts([[3, 4], [5]], ids=[8, 9], width=2),
        group=jnp.asarray([0, 1] * (n // 2), jnp.int32),
        tokens=jnp.arange(n, dtype=jnp.int32)[:, None] + jnp.asarray([[20, 40]]),
        lengths=jnp.asarray([1 + i % 2 for i in range(n)], jnp.int32),
        mask=jnp.arange(2) < jnp.asarray([[1 + i % 2] for i in range(n)]),
        logps=jnp.zeros((n, 2)),
        rewards=jnp.asarray(rewards, jnp.float32),
        finish=jnp.zeros(n, jnp.int32),
        temperature=jnp.ones(n),
    )


def test_the_best_and_the_worst_of_each_group_are_a_pair():
    pairs, picked = best_and_worst(episodes([0.5, np.nan, 2.0, 1.0, -1.0, 1.0]))
    np.testing.assert_array_equal(picked[0], [2, 4])
    np.testing.assert_array_equal(pairs.real, [True, False])  # B's scored ones are equal
    np.testing.assert_array_equal(pairs.rows.tokens[0], [3, 4, 22, 42, 24, 44])
    np.testing.assert_array_equal(pairs.rows.mask[0], [0, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(pairs.rows.ids, [8, 9])
    check_rows(pairs.rows)
    nobody, _ = best_and_worst(episodes([np.nan] * 4))
    assert not nobody.real.any()
    with pytest.raises(ValueError, match="at least 2 completions"):
        best_and_worst(episodes([1.0, 2.0]))


def test_optimism_lowers_what_the_reference_said():
    """XPO's last term is α log π(y′), of the pairs that count; the rest is DPO's."""
    collect = single_turn(goal_share, Sampling(max_tokens=2), group=1)
    models = WithReference(tiny(lora=False), tiny(lora=False, seed=3))
    algorithm = xpo(optax.sgd(0.1), collect, alpha=0.5, beta=0.5)
    state = algorithm.init(jr.key(0), models)
    batch, metrics = algorithm.rollout(jr.key(1), state, tasks(0)(0))
    assert batch.bonus is not None
    terms, _ = algorithm.loss(jr.key(2), models, batch)
    totals = batch.spans.sum(score(models.policy, batch.rows).logps)
    counts = np.asarray(batch.weights)
    real = np.sort(np.asarray(batch.bonus)[counts > 0], 1)
    np.testing.assert_array_equal(real, np.broadcast_to([0.0, 0.5], real.shape))
    expected = ((np.asarray(batch.bonus) * np.asarray(totals)).sum(1) * counts).sum() / counts.sum()
    np.testing.assert_allclose(terms["bonus"].value, expected, rtol=1e-5)
    assert 0 < counts.sum() < 4 and float(metrics["frac_tied"].value) == 1 - counts.mean()
    with pytest.raises(ValueError, match="1 completion of each prompt, got 2; pass group=1"):
        groups = single_turn(goal_share, Sampling(max_tokens=2), group=2)
        xpo(optax.sgd(0.1), groups).rollout(jr.key(1), state, tasks(0)(0))
