"""purepost's losses of what the peers are given: whole rollouts and losses of the factories."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float

from purepost import Algorithm, algorithms, losses
from purepost.advantages import gae, leave_one_out, whiten
from purepost.algorithms.kto import JudgedBatch
from purepost.mean import Terms, spans_of
from purepost.models.computed import Computed
from purepost.models.containers import Distill, WithReference
from purepost.models.critic import one_trunk
from purepost.models.decoder import Config, init_decoder
from purepost.models.heads import reward_model
from purepost.policy_batch import ActorCriticBatch, PolicyBatch, outcomes_of
from purepost.rewards import overlong_penalty
from purepost.rollout.collect import Episodes, Tasks, to_rows
from purepost.rollout.labelled import Pairs
from purepost.rollout.sample import LENGTH, STOP, pad_prompts
from purepost.types import Rows, causal_rows, group_rows
from tests.golden.peers.cases import (
    GOOD,
    GROUP,
    LENGTHS,
    MARGINS,
    PROMPT,
    ROWS,
    UNSCORED,
    VOCAB,
    WIDTH,
    fold,
    inputs,
    logps_of,
    sums,
)

X = inputs()
SGD = optax.sgd(0.1)
Result = tuple[Any, Any]
ALONE = partial(to_rows, per_row=1)
TINY = Config(
    vocab_size=VOCAB,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
)
PROMPTS = pad_prompts([X.tokens[i, :PROMPT].tolist() for i in range(0, ROWS, GROUP)], width=PROMPT)


def same(hidden: Float[Array, "*s v"]) -> Float[Array, "*s v"]:
    """An identity for a head."""
    return hidden


def model(logits: Any, rows: Any = None) -> Any:
    """A language model that has its logits at hand; `rows` says how they lie."""
    given = jnp.asarray(logits)
    return Computed(given if rows is None else rows(given), same)


def total(terms: Terms) -> Float[Array, ""]:
    """The loss."""
    return sum((m.value for m in terms.values()), start=jnp.zeros(()))


def differentiated(loss: Callable[[Any], Any], at: Any = X.logits) -> Result:
    """(value, gradient), of the logits folded as the peers' are."""
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(at))
    found = np.asarray(gradient)
    return value, fold(found) if found.shape == X.logits.shape else found


def episodes(rewards: Any, temperature: float) -> Episodes:
    """The completions as a collector brings them."""
    mask = jnp.asarray(X.mask[:, PROMPT:])
    sampled = logps_of(X.sampler, X.tokens, temperature)[:, PROMPT:]
    parts = jnp.asarray(rewards)
    return Episodes(
        prompts=PROMPTS,
        group=jnp.arange(ROWS, dtype=jnp.int32) // GROUP,
        tokens=jnp.asarray(X.tokens[:, PROMPT:]),
        lengths=jnp.asarray(LENGTHS, jnp.int32),
        mask=mask,
        logps=jnp.asarray(sampled),
        rewards=parts.sum(1),
        finish=jnp.where(jnp.asarray(LENGTHS) < WIDTH, STOP, LENGTH),
        temperature=jnp.full(ROWS, temperature),
        components=parts if parts.shape[1] > 1 else None,
    )


def policy(
    factory: Callable[..., Algorithm],
    *,
    rewards: Any = X.rewards[:, :1],
    temperature: float = 1.0,
    epochs: int = 2,
    rollout: Callable[..., Algorithm] | None = None,
    **options: Any,
) -> Result:
    """A policy gradient from given completions on: rollout and loss of the factory, or the rollout
    of another, where the factory's own draws completions (`dapo`).
    """

    def collect(key: Any, model: Any, tasks: Tasks) -> Any:
        return episodes(rewards, temperature), {}

    algorithm = factory(SGD, collect, epochs=epochs, lay=ALONE, **options)
    of_groups = {k: options[k] for k in ("advantage", "filters") if k in options}
    rolled = (rollout or factory)(
        SGD, collect, epochs=epochs, lay=ALONE, **(of_groups if rollout else options)
    )
    past = X.logits if epochs == 1 else X.old
    state = rolled.init(jr.key(0), WithReference(model(past), model(X.ref)))
    batch, _ = rolled.rollout(jr.key(0), state, Tasks(PROMPTS))

    def loss(logits: Any) -> Any:
        return total(algorithm.loss(jr.key(0), WithReference(model(logits)), batch)[0])

    return differentiated(loss)


def as_pairs(logits: Float[Array, "8 8 7"]) -> Float[Array, "4 14 7"]:
    """The logits as rows of [prompt | chosen | rejected] have them."""
    branches = logits[:, PROMPT:].reshape(ROWS // 2, 2 * WIDTH, -1)
    return jnp.concatenate([logits[::2, :PROMPT], branches], 1)


def pair_rows() -> Rows:
    """Rows of two completions."""
    pairs = ROWS // 2
    return group_rows(
        jnp.asarray(X.tokens[::2, :PROMPT]),
        jnp.full(pairs, PROMPT, jnp.int32),
        jnp.asarray(X.tokens[:, PROMPT:].reshape(pairs, 2, WIDTH)),
        jnp.asarray(LENGTHS.reshape(pairs, 2), jnp.int32),
        jnp.asarray(X.mask[:, PROMPT:].reshape(pairs, 2, WIDTH)),
    )


PAIRS = Pairs(pair_rows(), jnp.asarray(MARGINS), jnp.ones(ROWS // 2, bool))


def paired(factory: Callable[..., Algorithm], **options: Any) -> Result:
    """A loss of pairs, the reference scored in the rollout."""
    algorithm = factory(SGD, **options)
    state = algorithm.init(
        jr.key(0), WithReference(model(X.logits, as_pairs), model(X.ref, as_pairs))
    )
    batch, _ = algorithm.rollout(jr.key(0), state, PAIRS)

    def loss(logits: Any) -> Any:
        models = WithReference(model(logits, as_pairs))
        return total(algorithm.loss(jr.key(0), models, batch)[0])

    return differentiated(loss)


def whole_rows() -> Rows:
    """Each completion behind its prompt in a row of its own."""
    lengths = jnp.asarray(PROMPT + LENGTHS, jnp.int32)
    return causal_rows(jnp.asarray(X.tokens), lengths, jnp.asarray(X.mask))


ROWS_OF_ONE = whole_rows()
SPANS = spans_of(ROWS_OF_ONE)


def supervised(factory: Callable[..., Algorithm], **options: Any) -> Result:
    """A loss of rows."""
    loss = factory(SGD, **options).loss
    return differentiated(lambda logits: total(loss(jr.key(0), model(logits), ROWS_OF_ONE)[0]))


def distilled(divergence: Any, **options: Any) -> Result:
    """Logit distillation on rows."""
    settings: dict[str, Any] = {"alpha": 1.0, "temperature": 1.0} | options
    loss = algorithms.logit_distillation(SGD, divergence=divergence, **settings).loss

    def value(logits: Any) -> Any:
        models = Distill(model(logits), model(X.teacher))
        return total(loss(jr.key(0), models, ROWS_OF_ONE)[0])

    return differentiated(value)


def kto() -> Result:
    """KTO's loss with z of the mismatched rows."""
    kl = np.where(X.kl_mask, logps_of(X.kl_logits, X.kl_tokens), 0.0).sum(1)
    kl -= np.where(X.kl_mask, logps_of(X.kl_ref, X.kl_tokens), 0.0).sum(1)
    z = jnp.full(ROWS, max(kl.mean(), 0.0), jnp.float32)
    ref = jnp.asarray(sums(X.ref, X))
    batch = JudgedBatch(ROWS_OF_ONE, jnp.asarray(GOOD), jnp.ones(ROWS), ref, z)
    loss = algorithms.kto(SGD, beta=0.3, undesirable=0.5).loss
    return differentiated(
        lambda logits: total(loss(jr.key(0), WithReference(model(logits)), batch)[0])
    )


def scored() -> Result:
    """The reward model's loss; its gradient is by the scores, which are the hidden states."""
    made = reward_model(jr.key(0), init_decoder(jr.key(0), TINY))
    made = eqx.tree_at(lambda m: m.head, made, jnp.ones((1, 1)))
    loss = algorithms.reward_model(SGD, centring=0.1).loss

    def value(scores: Any) -> Any:
        branches = jnp.repeat(scores.reshape(ROWS // 2, 2), WIDTH, 1)
        hidden = jnp.pad(branches, [(0, 0), (PROMPT, 0)])[..., None]
        given = eqx.tree_at(lambda m: m.decoder, made, model(hidden))
        return total(loss(jr.key(0), given, PAIRS)[0])

    return differentiated(value, X.scores)


def nothing(key: Any, model: Any, tasks: Any) -> Any:
    """A collector that is not called."""
    raise AssertionError


def ppo(**options: Any) -> Result:
    """The policy's terms of PPO's loss, of advantages that are given; every value is 0."""
    old = jnp.asarray(logps_of(X.old, X.tokens))
    batch = PolicyBatch(
        ROWS_OF_ONE, SPANS.weights, padded(X.advantages), old, old, None, jnp.ones(ROWS)
    )
    zero = jnp.zeros(X.mask.shape)
    algorithm = algorithms.ppo(SGD, nothing, entropy=0.01, **options)
    made = one_trunk(WithReference(init_decoder(jr.key(0), TINY)))

    def loss(logits: Any) -> Any:
        given = (model(logits), jnp.zeros((VOCAB, 1)))
        models = eqx.tree_at(lambda m: (m.policy, m.critic.head), made, given)
        terms, _ = algorithm.loss(jr.key(0), models, ActorCriticBatch(batch, zero, zero, zero))
        return terms["policy"].value + terms["entropy"].value

    return differentiated(loss)


def padded(x: Any) -> Float[Array, "8 8"]:
    """Numbers of completions as rows have them."""
    return jnp.pad(jnp.asarray(x), [(0, 0), (PROMPT, 0)])


def value_loss() -> Result:
    """PPO's value loss; its gradient is by the critic's values."""
    old, returns = padded(X.old_values), padded(X.advantages)

    def loss(values: Any) -> Any:
        found, _ = losses.clipped_value(padded(values), old, returns, SPANS)
        return losses.token_mean(found, SPANS).value

    return differentiated(loss, X.values)


def generalised_advantages() -> Result:
    """Whitened advantages and returns of the trained tokens."""
    found, returns = gae(padded(X.advantages), padded(X.values), SPANS, gamma=0.9, decay=0.8)
    white = whiten(found, SPANS.spread(SPANS.weights))
    return np.stack([np.asarray(x)[X.mask] for x in (white, returns)]), []


def rloo_advantages() -> Result:
    """Leave-one-out advantages."""
    return leave_one_out(outcomes_of(episodes(X.rewards[:, :1], 1.0))), []


def penalties() -> Result:
    """The overlong penalty of these lengths, for a limit of 10 and a buffer of 4."""
    return overlong_penalty(jnp.asarray([*LENGTHS.tolist(), 8, 10, 14]), 10, 4), []


def unscored() -> Any:
    """The rewards with one that is missing."""
    rewards = X.rewards[:, :1].copy()
    rewards[UNSCORED] = np.nan
    return rewards
