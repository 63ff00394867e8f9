"""A small model learns to guess a hidden number by halving what is left, turn by turn.

    python experiments/agent_game.py        (or python -m experiments.agent_game)

A turn names one of 15 numbers and is told whether the hidden one is higher or lower; there are four
turns. A decoder of some 100,000 parameters first learns from games of a player who forgets: every
other guess is any number at all, the others any that is still possible. Two algorithms then go on
from there, with as many games each, whose only reward is the right guess: GRPO gives all turns of a
game the same credit, PPO each turn what its critic saw change. Bisection always wins. The warm-up,
and each algorithm's learning with its games, is one XLA program. It prints the table of
docs/agent_game.md and draws docs/agent_game.png.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

if __package__ is None or __package__ == "":  # run as a file: the root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import (
    ROOT,
    half_width,
    keep_table,
    plot_seeds,
    table_of_seeds,
    use_compile_cache,
)
from purepost import Algorithm, fuse
from purepost.algorithms import grpo, ppo, sft
from purepost.environments.guess import guess
from purepost.guards import recipe
from purepost.models import Config as Model
from purepost.models import WithReference, init_decoder
from purepost.models.critic import actor_critic
from purepost.rollout.collect import Tasks
from purepost.rollout.draw import Sampling
from purepost.rollout.multi_turn import multi_turn
from purepost.rollout.sample import Prompts
from purepost.turns import turn_gae
from purepost.types import KeyArray, Rows, causal_rows

BEGIN, HIGHER, LOWER, FIRST = 1, 2, 3, 4  # ids; FIRST + i names number i


@dataclass(frozen=True)
class Config:
    """The run. Sizes in games, turns, steps."""

    seeds: int = 5
    numbers: int = 15
    turns: int = 4
    skill: float = 0.5  # share of a demonstration's guesses that remember what was said
    warm_up: int = 300
    demonstrations: int = 128  # of a step of the warm-up
    steps: int = 300
    prompts: int = 16
    group: int = 16
    held_out: int = 32  # games for every number
    warm_up_rate: float = 3e-3
    learning_rate: float = 3e-3

    @property
    def model(self) -> Model:
        """A word for each number."""
        return Model(
            vocab_size=FIRST + self.numbers,
            hidden_size=64,
            intermediate_size=192,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            max_positions=2 * self.turns + 1,
        )


def won(config: Config) -> float:
    """How often the demonstrations' player wins: by what is left, and the turns."""
    n = config.numbers
    rates = np.zeros(n + 1)  # of so many numbers that are possible, with no turn left
    for _ in range(config.turns):
        before, rates = rates, np.zeros(n + 1)
        for left in range(1, n + 1):
            below = np.arange(left)  # possible numbers that are lower than the guess
            above = left - 1 - below
            good = (1 + below * before[below] + above * before[above]).mean() / left
            possible = config.skill + (1 - config.skill) * left / n
            rates[left] = possible * good + (1 - possible) * before[left]
    return float(rates[n])


def best(config: Config) -> float:
    """How often bisection wins: t turns tell 2^t − 1 numbers apart."""
    return min(1.0, (2**config.turns - 1) / config.numbers)


def demonstrate(key: KeyArray, config: Config) -> Rows:
    """Games of the player who forgets; only the guesses are trained on."""
    n = config.numbers

    def play(key: KeyArray) -> tuple[Array, Array]:
        k_hidden, k_play = jr.split(key)
        hidden = jr.randint(k_hidden, (), 0, n, jnp.int32)

        def turn(carry: Any, key: KeyArray) -> tuple[Any, tuple[Array, Array]]:
            low, high, over = carry  # the hidden number is in low … high − 1
            k_remembers, k_guess = jr.split(key)
            remembers = jr.bernoulli(k_remembers, config.skill)
            first, last = jnp.where(remembers, low, 0), jnp.where(remembers, high, n)
            named = jr.randint(k_guess, (), first, last, jnp.int32)
            up = hidden > named
            low = jnp.where(up, jnp.maximum(low, named + 1), low)
            high = jnp.where(hidden < named, jnp.minimum(high, named), high)
            said = jnp.stack([named + FIRST, jnp.where(up, HIGHER, LOWER).astype(jnp.int32)])
            return (low, high, over | (named == hidden)), (said, ~over)

        start = (jnp.int32(0), jnp.int32(n), jnp.bool_(False))
        _, (turns, played) = jax.lax.scan(turn, start, jr.split(k_play, config.turns))
        ids = jnp.concatenate([jnp.full(1, BEGIN, jnp.int32), turns.reshape(-1)[:-1]])
        return ids, 2 * played.sum(dtype=jnp.int32)

    ids, lengths = jax.vmap(play)(jr.split(key, config.demonstrations))
    return causal_rows(ids, lengths, ids >= FIRST)


def games(hidden: Int[Array, " p"]) -> Tasks:
    """Games whose numbers these are."""
    p = hidden.shape[0]
    ones, ids = jnp.ones(p, jnp.int32), jnp.arange(p, dtype=jnp.int32)
    return Tasks(Prompts(BEGIN * ones[:, None], ones, ids), {"number": hidden})


def learn(
    algorithm: Algorithm, models: Any, key: KeyArray, draw: Callable[[KeyArray], Any], steps: int
) -> tuple[Any, Array]:
    """(the models after so many steps on what is drawn for each, the mean reward of every step)."""
    step, (k_init, k_steps) = fuse(algorithm), jr.split(key)

    def body(state: Any, i: Int[Array, ""]) -> tuple[Any, Array]:
        k_step, k_data = jr.split(jr.fold_in(k_steps, i))
        state, metrics = step(k_step, state, draw(k_data))
        return state, metrics["reward"].value if "reward" in metrics else jnp.zeros(())

    state = algorithm.init(k_init, models)
    state, rewards = jax.lax.scan(body, state, jnp.arange(steps, dtype=jnp.int32))
    return state.models, rewards


def make_run(config: Config) -> Callable[[int], dict[str, Any]]:
    """seed → how often games are won before and after, and at every step."""
    game = guess(config.numbers, first_id=FIRST, higher_id=HIGHER, lower_id=LOWER)
    sampling, most = Sampling(max_tokens=1), 2 * config.turns - 1
    collect, single = (
        multi_turn(game, sampling, group=group, max_turns=config.turns, max_tokens=most)
        for group in (config.group, 1)
    )
    optimizer = recipe(config.learning_rate, steps=config.steps)

    def start(key: KeyArray) -> Tasks:
        return games(jr.randint(key, (config.prompts,), 0, config.numbers, jnp.int32))

    @jax.jit
    def warm_up(key: KeyArray) -> Any:
        k_model, k_learn = jr.split(key)
        algorithm = sft(recipe(config.warm_up_rate, steps=config.warm_up))
        model = init_decoder(k_model, config.model)
        draw = lambda key: demonstrate(key, config)  # noqa: E731
        return learn(algorithm, model, k_learn, draw, config.warm_up)[0]

    @jax.jit
    def by_game(key: KeyArray, model: Any) -> Any:
        return learn(grpo(optimizer, collect), WithReference(model), key, start, config.steps)

    @jax.jit
    def by_turn(key: KeyArray, model: Any) -> Any:
        algorithm = ppo(optimizer, collect, estimate=turn_gae)
        return learn(algorithm, actor_critic(WithReference(model)), key, start, config.steps)

    @jax.jit
    def evaluate(key: KeyArray, model: Any) -> Array:
        every = jnp.arange(config.numbers, dtype=jnp.int32)
        return single(key, model, games(jnp.repeat(every, config.held_out)))[0].rewards.mean()

    def run(seed: int) -> dict[str, Any]:
        k_warm, k_learn, k_test = jr.split(jr.key(seed), 3)
        before = warm_up(k_warm)
        (first, grpo_curve), (second, ppo_curve) = (f(k_learn, before) for f in (by_game, by_turn))
        rates = [evaluate(k_test, m) for m in (before, first.policy, second.policy)]
        return {"rates": np.stack(rates), "grpo": grpo_curve, "ppo": ppo_curve}

    return run


def table(rates: Float[np.ndarray, "n 3"], shown: float, best: float) -> str:
    """How often held-out games are won, as Markdown."""
    columns = {"before": rates[:, 0], "after GRPO": rates[:, 1], "after PPO": rates[:, 2]}
    ahead = rates[:, 2] - rates[:, 1]
    return table_of_seeds(columns) + (
        f"\n\nThe player of the demonstrations wins {shown:.3f} of games, bisection {best:.3f}. "
        f"PPO is ahead of GRPO by\n{ahead.mean():.3f} ± {half_width(ahead):.3f}."
    )


def main(config: Config) -> None:
    """Run every seed, print the table, and write it and the figure to docs/."""
    use_compile_cache()
    run = make_run(config)
    start = time.perf_counter()
    results = [jax.tree.map(np.asarray, run(seed)) for seed in range(config.seeds)]
    found = jax.tree.map(lambda *x: np.stack(x), *results)
    seconds = time.perf_counter() - start
    if config.seeds < 2:
        print(found["rates"])
        return
    text = table(found["rates"], won(config), best(config))
    print(text)
    print(f"{config.seeds} seeds in {seconds / 60:.1f} minutes, compilation included")
    plot_seeds(
        {"GRPO: share of games won": found["grpo"], "PPO: share of games won": found["ppo"]},
        ROOT / "docs" / "agent_game.png",
        title="Guessing a number of 15 in four turns",
        over="step",
        best=best(config),
    )
    keep_table(ROOT / "docs" / "agent_game.md", text)


if __name__ == "__main__":
    main(replace(Config(), seeds=int(sys.argv[1])) if len(sys.argv) > 1 else Config())
