"""Right and wrong compositions, for pyright to tell apart: tests/test_typing.py expects exactly the
errors that the comments name, each on its line. Nothing here runs.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from purepost import Algorithm, TrainState, algorithms, fuse, train
from purepost.advantages import group_normalized, penalized
from purepost.algorithms.feature_projection import with_projections
from purepost.algorithms.gkd import Demonstrations
from purepost.algorithms.grpo import PolicyBatch
from purepost.algorithms.nash_md import Prefer
from purepost.combine import Part, combine, over
from purepost.filters import at_most, finished
from purepost.losses import clipped, clipped_value, dppo_kl, k2, preference, tis, token_mean
from purepost.losses.distillation import cosine_distance, forward_kl
from purepost.mean import Metrics, Spans, Terms
from purepost.models.containers import Distill, WithReference, policy_trainable, student_trainable
from purepost.models.critic import ActorCritic, actor_critic, actor_critic_trainable
from purepost.models.decoder import Decoder
from purepost.models.heads import SequenceClassifier, ValueHead
from purepost.policy_batch import ActorCriticBatch
from purepost.rollout.collect import Collect, Reward, Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.labelled import Judged, Pairs, Steps
from purepost.types import KeyArray, Rows

Policy = WithReference[Decoder]
Grpo = Algorithm[Policy, Tasks, PolicyBatch]
Ppo = Algorithm[ActorCritic, Tasks, ActorCriticBatch]

adam = optax.adam(1e-2)


def parts_of_two_algorithms(grpo: Grpo, ppo: Ppo) -> None:
    """A loss, a rollout, an init or an update of another Batch, Data or Models."""
    init, rollout, loss, update = grpo.parts()
    other_init, other_rollout, other_loss, other_update = ppo.parts()
    Algorithm(init, rollout, loss, update)
    Algorithm(other_init, other_rollout, other_loss, other_update)
    Algorithm(init, rollout, other_loss, update)  # expect: reportArgumentType
    Algorithm(init, other_rollout, loss, update)  # expect: reportArgumentType
    Algorithm(other_init, rollout, loss, update)  # expect: reportArgumentType
    Algorithm(init, rollout, loss, other_update)  # expect: reportArgumentType


def parts_in_another_order(grpo: Grpo) -> None:
    """Each part in the place of another."""
    init, rollout, loss, update = grpo.parts()
    Algorithm(init, rollout, loss, update)
    Algorithm(init, loss, rollout, update)  # expect: reportArgumentType
    Algorithm(rollout, init, loss, update)  # expect: reportArgumentType
    Algorithm(init, rollout, update, loss)  # expect: reportArgumentType
    loss, rollout, init, update = grpo.parts()
    Algorithm(init, rollout, loss, update)  # expect: reportArgumentType


def a_loss_of_ones_own(grpo: Grpo) -> None:
    """Terms, not a number; of the batch that the rollout makes."""

    def mine(key: KeyArray, models: Policy, batch: PolicyBatch) -> tuple[Terms, Metrics]:
        return {}, {}

    def number(key: KeyArray, models: Policy, batch: PolicyBatch) -> tuple[Array, Metrics]:
        return jnp.zeros(()), {}

    def of_rows(key: KeyArray, models: Policy, batch: Rows) -> tuple[Terms, Metrics]:
        return {}, {}

    init, rollout, _, update = grpo.parts()
    Algorithm(init, rollout, mine, update)
    Algorithm(init, rollout, number, update)  # expect: reportArgumentType
    Algorithm(init, rollout, of_rows, update)  # expect: reportArgumentType


def models_of_another_algorithm(
    key: KeyArray,
    grpo: Grpo,
    ppo: Ppo,
    policy: Policy,
    critic: ActorCritic,
    distill: Distill[Decoder],
    scorer: SequenceClassifier,
) -> None:
    """Models that an init was not made for."""
    grpo.init(key, policy)
    grpo.init(key, critic)  # expect: reportArgumentType
    grpo.init(key, policy.policy)  # expect: reportArgumentType
    ppo.init(key, critic)
    ppo.init(key, policy)  # expect: reportArgumentType
    actor_critic(policy)
    actor_critic(policy.policy)  # expect: reportArgumentType
    algorithms.dpo(adam).init(key, policy)
    algorithms.dpo(adam).init(key, distill)  # expect: reportArgumentType
    algorithms.logit_distillation(adam).init(key, distill)
    algorithms.logit_distillation(adam).init(key, policy)  # expect: reportArgumentType
    algorithms.sft(adam).init(key, policy.policy)
    algorithms.sft(adam).init(key, policy)  # expect: reportArgumentType
    algorithms.reward_model(adam).init(key, scorer)
    algorithms.process_reward_model(adam).init(key, scorer)  # expect: reportArgumentType


def data_of_another_algorithm(
    key: KeyArray,
    grpo: Grpo,
    state: TrainState[Policy],
    tasks: Callable[[int], Tasks],
    pairs: Callable[[int], Pairs],
    judged: Callable[[int], Judged],
    steps: Callable[[int], Steps],
    shown: Callable[[int], Demonstrations],
) -> None:
    """Data that a rollout was not made for."""
    dpo, kto = algorithms.dpo(adam), algorithms.kto(adam)
    train(grpo, state, tasks, key=key, steps=1)
    train(grpo, state, pairs, key=key, steps=1)  # expect: reportArgumentType
    train(grpo, state, tasks(0), key=key, steps=1)  # expect: reportArgumentType
    train(dpo, state, pairs, key=key, steps=1)
    train(dpo, state, judged, key=key, steps=1)  # expect: reportArgumentType
    train(kto, state, judged, key=key, steps=1)
    train(kto, state, steps, key=key, steps=1)  # expect: reportArgumentType
    fuse(grpo)(key, state, tasks(0))
    fuse(grpo)(key, state, shown(0))  # expect: reportArgumentType


def a_state_of_another_algorithm(
    key: KeyArray,
    grpo: Grpo,
    state: TrainState[Policy],
    other: TrainState[ActorCritic],
    tasks: Callable[[int], Tasks],
    batch: PolicyBatch,
    rows: Rows,
) -> None:
    """A state that came of other models, a batch that came of another rollout."""
    train(grpo, state, tasks, key=key, steps=1)
    train(grpo, other, tasks, key=key, steps=1)  # expect: reportArgumentType
    fuse(grpo)(key, other, tasks(0))  # expect: reportArgumentType
    grpo.rollout(key, state, tasks(0))
    grpo.rollout(key, other, tasks(0))  # expect: reportArgumentType
    grpo.loss(key, state.models, batch)
    grpo.loss(key, state.models, rows)  # expect: reportArgumentType
    grpo.loss(key, state, batch)  # expect: reportArgumentType
    grpo.update(grpo.loss, key, state, batch)
    grpo.update(algorithms.dpo(adam).loss, key, state, batch)  # expect: reportArgumentType


def functions_of_a_policy_gradient(collect: Collect) -> None:
    """An advantage where an aggregate is asked, and the like."""
    algorithms.grpo(adam, collect, aggregate=token_mean)
    algorithms.grpo(adam, collect, aggregate=group_normalized)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, advantage=group_normalized)
    algorithms.grpo(adam, collect, advantage=token_mean)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, advantage=penalized)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, refine=partial(penalized, penalty=0.1))
    algorithms.grpo(adam, collect, refine=group_normalized)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, objective=clipped)
    algorithms.grpo(adam, collect, objective=k2)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, objective=preference.sigmoid)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, kl=k2)
    algorithms.grpo(adam, collect, kl=clipped)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, correction=tis(2.0))
    algorithms.grpo(adam, collect, correction=finished)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, filters=[finished, at_most(8)])
    algorithms.grpo(adam, collect, filters=[tis(2.0)])  # expect: reportArgumentType
    algorithms.grpo(adam, collect, filters=finished)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, trainable=policy_trainable)
    algorithms.grpo(adam, collect, trainable=actor_critic_trainable)  # expect: reportArgumentType
    algorithms.grpo(adam, collect, trainable=student_trainable)  # expect: reportArgumentType


def an_objective_of_ones_own(collect: Collect) -> None:
    """Losses per token, not their mean."""

    def mine(
        logps: Float[Array, "b t"],
        old_logps: Float[Array, "b t"],
        advantages: Float[Array, "b t"],
        spans: Spans,
    ) -> tuple[Float[Array, "b t"], Metrics]:
        return -logps * advantages, {}

    def alone(logps: Float[Array, "b t"], advantages: Float[Array, "b t"]) -> Float[Array, "b t"]:
        return -logps * advantages

    algorithms.grpo(adam, collect, objective=mine)
    algorithms.grpo(adam, collect, objective=alone)  # expect: reportArgumentType


def what_samples_and_what_scores(
    collect: Collect, reward: Reward, prefer: Prefer, sampling: Sampling, tasks: Tasks
) -> None:
    """A preference, a reward or a sampling where episodes are collected."""
    algorithms.grpo(adam, collect)
    algorithms.grpo(adam, prefer)  # expect: reportArgumentType
    algorithms.grpo(adam, reward)  # expect: reportArgumentType
    algorithms.grpo(adam, sampling)  # expect: reportArgumentType
    algorithms.grpo(collect, adam)  # expect: reportArgumentType
    single_turn(reward, sampling, group=4)
    single_turn(prefer, sampling, group=4)  # expect: reportArgumentType
    algorithms.nash_md(adam, prefer, sampling)
    algorithms.nash_md(adam, reward, sampling)  # expect: reportArgumentType
    algorithms.nash_md(adam, collect, sampling)  # expect: reportArgumentType
    algorithms.gkd(adam, sampling)
    algorithms.gkd(adam, collect)  # expect: reportArgumentType
    algorithms.online_dpo(adam, collect)
    algorithms.online_dpo(adam, prefer)  # expect: reportArgumentType


def functions_of_other_families(critic_loss: Callable[[ValueHead], Array]) -> None:
    """Losses and divergences in one another's place."""
    algorithms.dpo(adam, loss=preference.ipo)
    algorithms.dpo(adam, loss=clipped)  # expect: reportArgumentType
    algorithms.dpo(adam, loss=forward_kl)  # expect: reportArgumentType
    algorithms.dpo(adam, couple=preference.sorted_reference)
    algorithms.dpo(adam, couple=preference.wpo_weights)  # expect: reportArgumentType
    algorithms.dpo(adam, weigh=preference.wpo_weights)
    algorithms.dpo(adam, weigh=preference.sorted_reference)  # expect: reportArgumentType
    algorithms.logit_distillation(adam, divergence=forward_kl)
    algorithms.logit_distillation(adam, divergence=k2)  # expect: reportArgumentType
    algorithms.sft(adam, aggregate=token_mean)
    algorithms.sft(adam, aggregate=clipped_value)  # expect: reportArgumentType


def options_of_a_variant(collect: Collect, sampling: Sampling) -> None:
    """What a variant hands on to its parent is checked as the parent's own."""
    algorithms.dr_grpo(adam, collect, max_tokens=8, advantage=group_normalized, epochs=2)
    algorithms.dr_grpo(adam, collect, max_tokens=8, epoch=2)  # expect: reportCallIssue
    algorithms.dr_grpo(adam, collect)  # expect: reportCallIssue
    algorithms.rloo(adam, collect, objective=clipped)
    algorithms.rloo(adam, collect, advantage=token_mean)  # expect: reportArgumentType
    algorithms.dppo(adam, collect, divergence=dppo_kl)
    algorithms.dppo(adam, collect, divergence=k2)  # expect: reportArgumentType
    algorithms.simpo(adam, nll=0.1)
    algorithms.simpo(adam, loss=token_mean)  # expect: reportArgumentType
    algorithms.vapo(adam, collect, gamma=0.9)
    algorithms.vapo(adam, collect, advantage=group_normalized)  # expect: reportCallIssue
    algorithms.gkd(adam, sampling, epochs=2)
    algorithms.gkd(adam, sampling, epoch=2)  # expect: reportCallIssue
    algorithms.dft(adam, z_loss=1e-4)
    algorithms.dft(adam, beta=0.1)  # expect: reportCallIssue


def policy_of(models: Policy) -> Decoder:
    return models.policy


def student_of(models: Distill[Decoder]) -> Decoder:
    return models.student


def algorithms_added_up(
    grpo: Grpo, ppo: Ppo, key: KeyArray, state: TrainState[Policy], tasks: Tasks, rows: Rows
) -> None:
    """Parts over one models pytree, with data for each in their order."""
    beside = over(policy_of, algorithms.sft(adam))
    both = combine(Part("rl", grpo), Part("sft", beside, weight=0.1))
    combine(Part("rl", grpo), Part("ppo", ppo))  # expect: reportArgumentType
    combine(Part("rl", grpo), Part("sft", algorithms.sft(adam)))  # expect: reportArgumentType
    combine(grpo, beside)  # expect: reportArgumentType
    over(student_of, algorithms.sft(adam))
    over(policy_of, ppo)  # expect: reportArgumentType
    fuse(both)(key, state, (tasks, rows))
    fuse(both)(key, state, (rows, tasks))  # expect: reportArgumentType


def distillations_of_what_is_inside(distill: Distill[Decoder], key: KeyArray) -> None:
    """Divergences of distributions, distances of features; projections where they are trained."""
    algorithms.attention_transfer(adam, divergence=forward_kl)
    algorithms.attention_transfer(adam, divergence=k2)  # expect: reportArgumentType
    algorithms.attention_transfer(adam, layers=(1, 2))  # expect: reportArgumentType
    algorithms.feature_pooling(adam, distance=cosine_distance)
    algorithms.feature_pooling(adam, distance=token_mean)  # expect: reportArgumentType
    algorithms.feature_projection(adam).init(key, with_projections(key, distill))
    algorithms.feature_projection(adam).init(key, distill)  # expect: reportArgumentType
