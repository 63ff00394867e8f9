"""A small model learns to call a calculator instead of guessing, all as one XLA program.

    python experiments/agent_tool.py        (or python -m experiments.agent_tool)

A decoder of some 100,000 parameters first learns how one talks here, from dialogues of which half
call the calculator and copy its result, and half write down an answer at once: sums and products
that a model of this size does not work out. GRPO then rewards nothing but right answers, and the
model turns to the tool. The warm-up, the episodes of several turns (sampling, environment, tool),
the updates and the evaluations are one program for each seed. It prints the table of
docs/agent_tool.md and draws docs/agent_tool.png.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Int

if __package__ is None or __package__ == "":  # run as a file: the root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import ROOT, keep_table, plot_seeds, table_of_seeds, use_compile_cache
from purepost import fuse
from purepost.algorithms import grpo, sft
from purepost.environments.calculator import (
    ANSWER,
    CALL,
    END,
    LETTERS,
    calculator,
    problems,
    spell,
)
from purepost.models import Config as Model
from purepost.models import WithReference, init_decoder
from purepost.models.decoder import Decoder
from purepost.rollout.collect import Collect
from purepost.rollout.draw import Sampling
from purepost.rollout.multi_turn import multi_turn
from purepost.types import KeyArray, Rows, causal_rows

FIRST = 1  # the id of the first letter; 0 is padding
RESULT = 7  # letters of a result with its end


@dataclass(frozen=True)
class Config:
    """The run. Sizes in problems, episodes, dialogues, steps."""

    seeds: int = 5
    warm_up: int = 500
    dialogues: int = 64  # of a step of the warm-up
    steps: int = 80
    prompts: int = 16
    group: int = 8
    held_out: int = 256
    operands: int = 2
    digits: int = 2
    warm_up_rate: float = 3e-3
    learning_rate: float = 1e-3
    model: Model = Model(
        vocab_size=1 + len(LETTERS),
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_positions=64,
    )

    @property
    def turn(self) -> int:
        """Tokens of the longest turn: a call of the whole expression."""
        return self.operands * (self.digits + 1) + 1

    @property
    def behind(self) -> int:
        """Tokens behind the prompt: a call, its result, an answer."""
        return 2 * self.turn + 2 * RESULT


def draw_dialogues(key: KeyArray, config: Config) -> Rows:
    """Problems with their solutions: every other one calls the calculator with the whole expression
    and copies the result, the others answer at once. What the calculator says is not trained on.
    """
    n = config.dialogues
    tasks = problems(key, n, operands=config.operands, digits=config.digits, first_id=FIRST)
    width = tasks.prompts.tokens.shape[1] + config.behind

    def write(text: Array, length: Array, answer: Array, calls: Array) -> tuple[Array, ...]:
        result = spell(answer)
        parts = [
            (text, length, False),
            (jnp.full(1, CALL + FIRST, jnp.int32), calls, True),
            (text, calls * length, True),
            (result.ids + FIRST, calls * result.length, False),
            (jnp.full(1, ANSWER + FIRST, jnp.int32), jnp.int32(1), True),
            (result.ids + FIRST, result.length, True),
        ]
        ids, mask = jnp.zeros(width + 16, jnp.int32), jnp.zeros(width + 16, bool)
        at = jnp.int32(0)
        for part, size, said in parts:
            here = jnp.arange(part.shape[0]) < size
            ids = jax.lax.dynamic_update_slice(ids, jnp.where(here, part, 0), (at,))
            mask = jax.lax.dynamic_update_slice(mask, here & said, (at,))
            at = at + size
        return ids[:width], mask[:width], at

    calls = jnp.arange(n, dtype=jnp.int32) % 2
    prompts = tasks.prompts
    ids, mask, lengths = jax.vmap(write)(
        prompts.tokens, prompts.lengths, tasks.columns["answer"], calls
    )
    return causal_rows(ids, lengths, mask)


def collector(config: Config, group: int, temperature: float = 1.0) -> Collect:
    """Episodes with the calculator: two calls at most, and an answer."""
    return multi_turn(
        calculator(first_id=FIRST, result_width=RESULT),
        Sampling(max_tokens=config.turn, temperature=temperature, stop_ids=(END + FIRST,)),
        group=group,
        max_turns=3,
        max_tokens=config.behind,
    )


def make_run(config: Config) -> Callable[[Int[Array, ""]], dict[str, Any]]:
    """seed → success and calls before and after, and at every step: a pure function."""

    def tasks(key: KeyArray, n: int) -> Any:
        return problems(key, n, operands=config.operands, digits=config.digits, first_id=FIRST)

    def optimizer(rate: float) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.0))

    warm = sft(optimizer(config.warm_up_rate))
    learn = grpo(optimizer(config.learning_rate), collector(config, config.group))
    greedy = collector(config, 1, temperature=0.0)

    def evaluate(key: KeyArray, model: Decoder) -> tuple[Array, Array]:
        episodes, metrics = greedy(key, model, tasks(key, config.held_out))
        return episodes.rewards.mean(), metrics["turns"].value - 1

    def run(seed: Int[Array, ""]) -> dict[str, Any]:
        k_model, k_init, k_warm, k_learn, k_test = jr.split(jr.key(seed), 5)
        state = warm.init(k_init, init_decoder(k_model, config.model))
        warm_step, step = fuse(warm), fuse(learn)

        def warmed(state, i):
            key, k_data = jr.split(jr.fold_in(k_warm, i))
            state, metrics = warm_step(key, state, draw_dialogues(k_data, config))
            return state, metrics["loss"].value

        def learned(state, i):
            key, k_data = jr.split(jr.fold_in(k_learn, i))
            state, metrics = step(key, state, tasks(k_data, config.prompts))
            return state, (metrics["reward"].value, metrics["turns"].value - 1)

        state, losses = jax.lax.scan(warmed, state, jnp.arange(config.warm_up, dtype=jnp.int32))
        warmed_up = cast(Decoder, state.models)  # sft takes any language model
        before = evaluate(k_test, warmed_up)
        state = learn.init(k_init, WithReference(warmed_up))
        state, curves = jax.lax.scan(learned, state, jnp.arange(config.steps, dtype=jnp.int32))
        after = evaluate(k_test, state.models.policy)
        return {"losses": losses, "before": before, "after": after, "curves": curves}

    return run


def table(found: dict[str, Any]) -> str:
    """Success and calls on held-out problems, before and after, as Markdown."""
    columns = {
        f"{name} {when}": np.asarray(found[when][i])
        for i, name in enumerate(("right", "calls"))
        for when in ("before", "after")
    }
    return table_of_seeds(columns)


def main(config: Config) -> None:
    """Run every seed, print the table, and write it and the figure to docs/."""
    use_compile_cache()
    run = jax.jit(make_run(config))
    start = time.perf_counter()
    results = [jax.tree.map(np.asarray, run(jnp.int32(seed))) for seed in range(config.seeds)]
    found = jax.tree.map(lambda *x: np.stack(x), *results)
    seconds = time.perf_counter() - start
    text = table(found)
    print(text)
    print(f"{config.seeds} seeds in {seconds / 60:.1f} minutes, compilation included")
    if config.seeds < 2:
        return
    rewards, calls = found["curves"]
    plot_seeds(
        {"share of right answers": rewards, "calls of the calculator per problem": calls},
        ROOT / "docs" / "agent_tool.png",
        title="Learning to call a calculator",
        over="step of GRPO",
    )
    keep_table(ROOT / "docs" / "agent_tool.md", text)


if __name__ == "__main__":
    main(replace(Config(), seeds=int(sys.argv[1])) if len(sys.argv) > 1 else Config())
