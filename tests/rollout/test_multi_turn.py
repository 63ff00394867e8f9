"""Episodes of several turns: replayed on the host turn by turn, and scored by teacher forcing."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

from purepost.models import Decoder
from purepost.rollout.collect import Collect, Episodes, Tasks, to_rows
from purepost.rollout.draw import Sampling
from purepost.rollout.environment import (
    ERROR,
    MAX_TURNS,
    TIMEOUT,
    Environment,
    Tokens,
    by_finish,
    settle,
)
from purepost.rollout.multi_turn import multi_turn
from purepost.rollout.sample import LENGTH, STOP, pad_prompts
from purepost.rollout.score import score
from purepost.rollout.stop import stop_strings
from purepost.types import KeyArray, check_rows

END, BREAK, WIN, WIDTH = 1, 2, 3, 3
GROUP, TURNS, ROOM = 3, 4, 20
TASKS = Tasks(pad_prompts([[4, 5], [6], [7, 8, 9]], ids=[2, 5, 11], width=3))
DRAWN = Sampling(max_tokens=4, stop_ids=(END,))


class Count(eqx.Module):
    turns: Int[Array, ""]
    noise: Int[Array, ""]


def reset(key: KeyArray, task: dict[str, Array]) -> tuple[Count, Tokens]:
    noise = jr.randint(key, (), 4, 19, jnp.int32)
    ids = jnp.stack([noise, noise, jnp.int32(0)])
    return Count(jnp.zeros((), jnp.int32), noise), Tokens(ids, jnp.int32(2))


def step(
    key: KeyArray, state: Count, action: Tokens
) -> tuple[Count, Tokens, Float[Array, ""], Bool[Array, ""]]:
    """Answers with as many tokens as the turn's last one says, modulo 4; WIN ends the episode,
    BREAK the environment.
    """
    last = action.ids[action.length - 1]
    here = jnp.arange(action.ids.shape[0]) < action.length
    length = last % 4
    ids = jnp.where(jnp.arange(WIDTH) < length, jr.randint(key, (WIDTH,), 4, 19, jnp.int32), 0)
    won = ((action.ids == WIN) & here).any()
    broken = ((action.ids == BREAK) & here).any()
    reward = action.length.astype(jnp.float32) + jnp.where(won, 10.0, 0.0)
    reward = jnp.where(broken, jnp.nan, reward)
    return Count(state.turns + 1, state.noise), Tokens(ids, length), reward, won


ENV = Environment(reset, step)


def collector(sampling: Sampling = DRAWN, **options: Any) -> Collect:
    options = {"group": GROUP, "max_turns": TURNS, "max_tokens": ROOM} | options
    return multi_turn(ENV, sampling, **options)


def replay(
    key: KeyArray,
    episodes: Episodes,
    i: int,
    sampling: Sampling = DRAWN,
    turns: int = TURNS,
    ends: Callable[[list[int]], bool] = lambda said: said[-1] == END,
) -> tuple[list[float], int, list[int], list[bool]]:
    """Play the environment against the turns that were sampled: rewards of the turns, how it ends,
    and the tokens behind the prompt with their mask.
    """
    k_reset, _, k_step = jr.split(key, 3)
    task = int(TASKS.prompts.ids[int(episodes.group[i])])
    state, _ = reset(jr.fold_in(k_reset, task), {})
    tokens, mask = np.asarray(episodes.tokens[i]), np.asarray(episodes.mask[i])
    at, rewards, out, says = 0, [], [], []
    for turn in range(turns):
        said: list[int] = []
        while not said or not (ends(said) or len(said) == sampling.max_tokens or at == len(tokens)):
            said.append(int(tokens[at]))
            assert mask[at]
            at += 1
        out, says = out + said, says + [True] * len(said)
        ids = jnp.asarray(said + [0] * (sampling.max_tokens - len(said)), jnp.int32)
        k = jr.fold_in(jr.fold_in(k_step, task * GROUP + i % GROUP), turn)
        state, answer, reward, done = step(k, state, Tokens(ids, jnp.int32(len(said))))
        if np.isnan(reward):
            return rewards, ERROR, out, says
        rewards.append(float(reward))
        if done or turn + 1 == turns:
            return rewards, STOP if done else MAX_TURNS, out, says
        heard = answer.ids[: int(answer.length)].tolist()
        if at + len(heard) >= len(tokens):
            return rewards, LENGTH, out, says
        out, says = out + heard, says + [False] * len(heard)
        assert tokens[at : at + len(heard)].tolist() == heard
        at += len(heard)
    raise AssertionError


@pytest.fixture(scope="module")
def played(model: Decoder) -> Episodes:
    return collector()(jr.key(3), model, TASKS)[0]


def check(episodes: Episodes, key: KeyArray, discount: float = 1.0, **how: Any) -> set[int]:
    """The episodes are what the environment makes of their turns. How they ended."""
    ends = set()
    for i in range(len(episodes.group)):
        rewards, finish, tokens, mask = replay(key, episodes, i, **how)
        n, width = int(episodes.lengths[i]), episodes.tokens.shape[1]
        assert episodes.tokens[i].tolist() == tokens + [0] * (width - n)
        assert episodes.mask[i].tolist() == mask + [False] * (width - n)
        assert int(episodes.finish[i]) == finish
        earned = np.asarray(episodes.step_rewards)[i]
        assert earned[earned != 0].tolist() == rewards
        assert not earned[~np.asarray(episodes.mask[i])].any()
        total = np.nan if finish == ERROR else sum(r * discount**k for k, r in enumerate(rewards))
        np.testing.assert_allclose(float(episodes.rewards[i]), total, rtol=1e-6)
        ends.add(finish)
    return ends


def test_every_turn_is_answered_by_the_environment(played: Episodes) -> None:
    assert len(check(played, jr.key(3))) >= 3


def test_log_probabilities_are_those_of_teacher_forcing(model: Decoder, played: Episodes) -> None:
    rows, places = to_rows(played)
    check_rows(rows)
    found = np.asarray(score(model, rows).logps)
    drawn = np.asarray(places.per_token(played.logps))
    assert (drawn != 0).sum() == played.mask.sum()
    np.testing.assert_allclose(drawn, found, atol=2e-5)


def test_the_first_observation_ends_the_prompt(played: Episodes) -> None:
    assert played.prompts.lengths.tolist() == [4, 3, 5]
    for prompt, begin in zip(played.prompts.tokens.tolist(), ([4, 5], [6], [7, 8, 9]), strict=True):
        n = len(begin)
        assert prompt[:n] == begin and prompt[n] == prompt[n + 1] >= 4
        assert not any(prompt[n + 2 :])


def test_rollouts_do_not_depend_on_one_another(model: Decoder, played: Episodes) -> None:
    order = jnp.asarray([2, 0, 1])
    moved = Tasks(jax.tree.map(lambda x: x[order], TASKS.prompts))
    other, _ = collector()(jr.key(3), model, moved)
    rows = jnp.asarray([6, 7, 8, 0, 1, 2, 3, 4, 5])
    expected = jax.tree.map(lambda x: x[rows], eqx.tree_at(lambda e: e.prompts, played, None))
    for name in ("tokens", "mask", "rewards", "finish", "step_rewards"):
        np.testing.assert_array_equal(vars(other)[name], vars(expected)[name])


def test_budgets_end_turns_and_episodes(model: Decoder) -> None:
    sampling = Sampling(max_tokens=2, temperature=0.0, stop_ids=(END,))
    collect = collector(sampling, max_turns=2, max_tokens=5, discount=0.5)
    episodes, metrics = collect(jr.key(4), model, TASKS)
    check(episodes, jr.key(4), 0.5, sampling=sampling, turns=2)
    shares = sum(float(m.value) for n, m in metrics.items() if n.startswith("finish/"))
    assert shares == pytest.approx(1)
    assert 1 <= float(metrics["turns"].value) <= 2
    # Greedy log-probabilities are taken at temperature 1.
    assert episodes.temperature.tolist() == [1.0] * 9
    rows, places = to_rows(episodes)
    np.testing.assert_allclose(
        places.per_token(episodes.logps), score(model, rows).logps, atol=2e-5
    )


def test_impossible_budgets_are_errors(model: Decoder) -> None:
    with pytest.raises(ValueError, match="≤ 64 positions, got 6 . 59"):
        collector(max_tokens=59)(jr.key(0), model, TASKS)
    for name in ("group", "max_turns", "max_tokens"):
        wrong: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=f"expected {name} ≥ 1, got 0"):
            collector(**wrong)


def test_a_turn_ends_with_a_stop_string(model: Decoder) -> None:
    words = [bytes([97 + i]) for i in range(19)]
    strings = ["ef", "h", "k"]

    def ends(said: list[int]) -> bool:
        text = b"".join(words[t] for t in said)
        return text.endswith(tuple(s.encode() for s in strings))

    sampling = Sampling(max_tokens=6)
    collect = collector(sampling, stop=stop_strings(strings, words))
    episodes, _ = collect(jr.key(5), model, TASKS)
    check(episodes, jr.key(5), sampling=sampling, ends=ends)


def test_why_an_episode_ended_makes_its_reward(played: Episodes) -> None:
    worth = by_finish({MAX_TURNS: -1.0, LENGTH: np.nan})
    judged = settle(played, worth)
    for i, finish in enumerate(played.finish.tolist()):
        expected = {MAX_TURNS: -1.0, LENGTH: np.nan}.get(finish, float(played.rewards[i]))
        np.testing.assert_equal(float(judged.rewards[i]), expected)
        if finish == MAX_TURNS:
            steps = np.asarray(judged.step_rewards)[i]
            assert steps.sum() == -1 and steps[int(played.lengths[i]) - 1] == -1
    with pytest.raises(ValueError, match="expected reasons among"):
        by_finish({TIMEOUT: 0.0, 9: 1.0})


def test_a_vmap_over_keys_is_each_key_alone(model: Decoder, played: Episodes) -> None:
    run = lambda key: collector()(key, model, TASKS)[0]  # noqa: E731
    both = jax.jit(jax.vmap(run))(jnp.stack([jr.key(4), jr.key(3)]))
    for name in ("tokens", "mask", "rewards", "finish", "step_rewards"):
        np.testing.assert_array_equal(vars(both)[name][1], vars(played)[name])
