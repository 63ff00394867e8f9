"""Episodes of several turns with an environment in JAX: one loop over tokens in which each rollout
speaks or reads what it is answered.

All rollouts fill their slots in step, whoever is speaking in each, so that decoding is that of a
single turn. A token is sampled or read, never encoded again; nothing is padded between turns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, Key

from ..mean import Metrics
from ..models.cache import Cache, decode, grow, prefill, unstack
from ..models.decoder import Decoder
from ..types import KeyArray, Scalar
from ..weights import for_sampling
from .collect import Collect, Episodes, Tasks
from .draw import Sampling, draw
from .environment import (
    ERROR,
    MAX_TURNS,
    Environment,
    Outcome,
    Tokens,
    as_earned,
    finish_metrics,
    settle,
)
from .sample import LENGTH, STOP, Prompts, stages
from .stop import StopStrings


def multi_turn(
    env: Environment,
    sampling: Sampling,
    *,
    group: int,
    max_turns: int,
    max_tokens: int,
    discount: Scalar = 1.0,
    outcome: Outcome = as_earned,
    stop: StopStrings | None = None,
) -> Collect:
    """`group` episodes of every task, all from the same start. A JAX function.

    A prompt is the task's, followed by the first observation. A turn ends with a stop id or string,
    after `sampling.max_tokens` tokens, or with the episode's `max_tokens`, which count the
    observations; the environment then answers it as it stands. An episode ends when the environment
    says so (STOP), fails (ERROR: unscored), after `max_turns` turns, or out of tokens (LENGTH). Its
    reward is Σ_k discount^k r_k over turns k, and `outcome` has the last word. What nothing sampled
    follows is left out.
    """
    for name, n in dict(group=group, max_turns=max_turns, max_tokens=max_tokens).items():
        if n < 1:
            raise ValueError(f"expected {name} ≥ 1, got {n}")

    def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        rules = _Rules(env, sampling, stop, group, max_turns, max_tokens, discount)
        episodes, turns = _roll_out(key, model, tasks, rules)
        return settle(episodes, outcome), finish_metrics(episodes.finish, turns)

    return collect


class _Rules(eqx.Module):
    """What holds throughout."""

    env: Environment = eqx.field(static=True)
    sampling: Sampling
    stop: StopStrings | None
    group: int = eqx.field(static=True)
    max_turns: int = eqx.field(static=True)
    max_tokens: int = eqx.field(static=True)
    discount: Scalar


class _Play(eqx.Module):
    """The loop's carry: n rollouts of t slots each behind their prompts."""

    step: Int[Array, ""]  # slots filled
    tokens: Int[Array, "n t"]
    logps: Float[Array, "n t"]
    mask: Bool[Array, "n t"]
    rewards: Float[Array, "n t"]
    total: Float[Array, " n"]
    turns: Int[Array, " n"]  # that are over
    spoken: Int[Array, " n"]  # tokens of this turn
    matched: Int[Array, "n w"]  # bytes of each stop string
    answer: Tokens  # of every rollout: the last observation
    read: Int[Array, " n"]  # tokens of it
    ended: Bool[Array, " n"]
    finish: Int[Array, " n"]
    env: Any  # the environment's state of every rollout
    cache: Cache


@eqx.filter_jit
def _roll_out(
    key: KeyArray, model: Decoder, tasks: Tasks, rules: _Rules
) -> tuple[Episodes, Int[Array, " n"]]:
    """The episodes as earned, and how many turns each took."""
    k_reset, k_sample, k_step = jr.split(key, 3)
    each = lambda k, ids: jax.vmap(lambda i: jr.fold_in(k, i))(ids)  # noqa: E731
    start, first = jax.vmap(rules.env.reset)(each(k_reset, tasks.prompts.ids), tasks.columns)
    prompts = _followed_by(tasks.prompts, first)
    p, width = prompts.tokens.shape
    group, slots, limit = rules.group, rules.max_tokens, model.config.max_positions
    if width + slots > limit:
        raise ValueError(
            f"expected prompt window + max_tokens ≤ {limit} positions, got {width} + {slots}; "
            "shorten one of them"
        )
    model = for_sampling(model)
    blocks, unembed = unstack(model), model.unembed
    ids = (prompts.ids[:, None] * group + jnp.arange(group, dtype=jnp.int32)).reshape(-1)
    sample_keys, step_keys = each(k_sample, ids), each(k_step, ids)

    def turn(play: _Play, logits: Float[Array, "n v"]) -> _Play:
        play, over = _utter(play, logits, sample_keys, rules)
        return jax.lax.cond(
            over.any(), lambda x: _answer(x, over, step_keys, rules), lambda x: x, play
        )

    def going_until(step: int) -> Callable[[_Play], Bool[Array, ""]]:
        return lambda play: (play.step < step) & ~play.ended.all()

    def advance(play: _Play) -> _Play:
        at = play.step - 1
        last = jax.lax.dynamic_index_in_dim(play.tokens, at, 1, keepdims=False)
        hidden, cache = decode(model, blocks, play.cache, last.reshape(p, group), at)
        play = eqx.tree_at(lambda x: x.cache, play, cache)
        return turn(play, unembed(hidden.reshape(p * group, -1)))

    rooms = stages(slots)
    last, cache = prefill(model, prompts.tokens, prompts.lengths, group, rooms[0])
    owner = jnp.repeat(jnp.arange(p, dtype=jnp.int32), group)
    start, first = jax.tree.map(lambda x: x[owner], (start, first))
    play = turn(_opening(start, first, cache, rules), unembed(last)[owner])
    for room in rooms:
        play = eqx.tree_at(lambda x: x.cache, play, grow(play.cache, room))
        drawn = min(room + 1, slots)  # the last one is not in the cache
        play = jax.lax.while_loop(going_until(drawn), advance, play)
    return _closing(play, prompts, owner, rules), play.turns


def _followed_by(prompts: Prompts, more: Tokens) -> Prompts:
    """Prompts that go on with a text each."""
    p, width = prompts.tokens.shape
    room = more.ids.shape[1]
    index = jnp.arange(width + room, dtype=jnp.int32)
    begin = prompts.lengths[:, None]
    behind = index - begin
    there = (behind >= 0) & (behind < more.length[:, None])
    padded = jnp.pad(more.ids, [(0, 0), (0, width)])  # so that no index is beyond it
    added = jnp.take_along_axis(padded, jnp.clip(behind, 0, width + room - 1), 1)
    before = jnp.where(index < begin, jnp.pad(prompts.tokens, [(0, 0), (0, room)]), 0)
    return Prompts(jnp.where(there, added, before), prompts.lengths + more.length, prompts.ids)


def _opening(start: Any, first: Tokens, cache: Cache, rules: _Rules) -> _Play:
    """Before the first token: the first observation stands in the prompt, as if read."""
    n, slots = first.length.shape[0], rules.max_tokens
    none = jnp.zeros(n, jnp.int32)
    return _Play(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((n, slots), jnp.int32),
        logps=jnp.zeros((n, slots)),
        mask=jnp.zeros((n, slots), bool),
        rewards=jnp.zeros((n, slots)),
        total=jnp.zeros(n),
        turns=none,
        spoken=none,
        matched=_unmatched(n, rules),
        answer=first,
        read=first.length,
        ended=jnp.zeros(n, bool),
        finish=jnp.full(n, LENGTH, jnp.int32),
        env=start,
        cache=cache,
    )


def _unmatched(n: int, rules: _Rules) -> Int[Array, "n w"]:
    return jnp.zeros((n, 0), jnp.int32) if rules.stop is None else rules.stop.start(n)


def _utter(
    play: _Play, logits: Float[Array, "n v"], keys: Key[Array, " n"], rules: _Rules
) -> tuple[_Play, Bool[Array, " n"]]:
    """Fill a slot of every rollout that has not ended, and say whose turn that ends."""
    at, sampling = play.step, rules.sampling
    speaks = ~play.ended & (play.read >= play.answer.length)
    reads = ~play.ended & ~speaks
    token, logp = draw(jax.vmap(lambda k: jr.fold_in(k, at))(keys), logits, sampling)
    heard = jnp.take_along_axis(play.answer.ids, play.read[:, None], 1, mode="clip")[:, 0]
    hit = (token[:, None] == jnp.asarray(sampling.stop_ids, jnp.int32)).any(-1)
    matched = play.matched
    if rules.stop is not None:
        following, complete = rules.stop.advance(matched, token)
        matched = jnp.where(speaks[:, None], following, matched)
        hit |= complete
    spoken = play.spoken + speaks.astype(jnp.int32)
    out = (spoken >= sampling.max_tokens) | (at == rules.max_tokens - 1)
    filled = dataclasses.replace(
        play,
        step=at + 1,
        tokens=play.tokens.at[:, at].set(jnp.where(speaks, token, jnp.where(reads, heard, 0))),
        logps=play.logps.at[:, at].set(jnp.where(speaks, logp, 0.0)),
        mask=play.mask.at[:, at].set(speaks),
        spoken=spoken,
        matched=matched,
        read=play.read + reads.astype(jnp.int32),
    )
    return filled, speaks & (hit | out)


def _answer(play: _Play, over: Bool[Array, " n"], keys: Key[Array, " n"], rules: _Rules) -> _Play:
    """Step the environments of the rollouts whose turn is over."""
    at, room = play.step - 1, jnp.arange(rules.sampling.max_tokens, dtype=jnp.int32)
    place = at - play.spoken[:, None] + 1 + room
    said = jnp.take_along_axis(play.tokens, place, 1, mode="clip")
    action = Tokens(jnp.where(room < play.spoken[:, None], said, 0), play.spoken)
    turn_keys = jax.vmap(jr.fold_in)(keys, play.turns)
    env, answer, reward, done = jax.vmap(rules.env.step)(turn_keys, play.env, action)
    failed = ~jnp.isfinite(reward)
    turns = play.turns + 1
    last = turns >= rules.max_turns
    why = jnp.where(last, MAX_TURNS, LENGTH)
    why = jnp.where(failed, ERROR, jnp.where(done, STOP, why)).astype(jnp.int32)
    earned = jnp.where(over & ~failed, reward, 0.0)
    weight = jnp.asarray(rules.discount, jnp.float32) ** play.turns.astype(jnp.float32)

    def where_over(new: Any, old: Any) -> Any:
        def choose(a: Array, b: Array) -> Array:
            return jnp.where(over.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(choose, new, old)

    return dataclasses.replace(
        play,
        rewards=play.rewards.at[:, at].set(earned),
        total=play.total + weight * earned,
        turns=where_over(turns, play.turns),
        spoken=where_over(jnp.zeros_like(play.spoken), play.spoken),
        matched=where_over(_unmatched(over.shape[0], rules), play.matched),
        answer=where_over(answer, play.answer),
        read=where_over(jnp.zeros_like(play.read), play.read),
        ended=play.ended | (over & (failed | done | last)),
        finish=where_over(why, play.finish),
        env=where_over(env, play.env),
    )


def _closing(play: _Play, prompts: Prompts, owner: Int[Array, " n"], rules: _Rules) -> Episodes:
    """The episodes, without what they read after their last turn."""
    n, t = play.tokens.shape
    lengths = (t - jnp.argmax(play.mask[:, ::-1], 1)).astype(jnp.int32)
    # Greedy log-probabilities are taken at temperature 1.
    temperature = jnp.asarray(rules.sampling.temperature, jnp.float32)
    return Episodes(
        prompts=prompts,
        group=owner,
        tokens=jnp.where(jnp.arange(t) < lengths[:, None], play.tokens, 0),
        lengths=lengths,
        mask=play.mask,
        logps=play.logps,
        rewards=jnp.where(play.finish == ERROR, jnp.nan, play.total),
        finish=play.finish,
        temperature=jnp.broadcast_to(jnp.where(temperature > 0, temperature, 1.0), (n,)),
        step_rewards=play.rewards,
    )
