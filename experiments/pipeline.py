"""SFT → RL → distillation in one script, with a tiny model.

    python experiments/pipeline.py        (or python -m experiments.pipeline)

The task: name the largest of four digits, four times over. Half of the demonstrations are wrong.

1. SFT imitates the demonstrations, mistakes included.
2. GRPO, with a little of SFT's loss added to its own, gets beyond them.
3. A smaller model is distilled from the second stage's: GKD, half on its own completions and half
   on the demonstrations', and its hidden states towards the teacher's.

It prints the share of right tokens that each model samples for digits it was not trained on; the
smaller one on demonstrations alone shows what it owes to its teacher.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import jax.random as jr
import optax

if __package__ is None or __package__ == "":  # run as a file: the root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import fused_seeds
from experiments.common import use_compile_cache
from experiments.fused_seeds import DIGITS, draw_tasks, largest
from purepost import Algorithm, Rows, train
from purepost.algorithms import feature_pooling, gkd, grpo, sft
from purepost.algorithms.gkd import Demonstrations
from purepost.combine import Part, combine, over
from purepost.models import Config as Model
from purepost.models import Decoder, WithReference, init_decoder
from purepost.models.containers import Distill
from purepost.rollout.collect import single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import generate
from purepost.tree import count
from purepost.types import KeyArray, causal_rows

Models = TypeVar("Models")
TASK = fused_seeds.Config(prompts=32, group=8, length=4)


@dataclass(frozen=True)
class Config:
    """The run. Sizes in steps, prompts, and those of a model."""

    seed: int = 0
    steps: int = 150  # of each stage
    held_out: int = 256
    wrong: float = 0.5  # share of the demonstrations
    sft_weight: float = 0.02  # of its loss beside GRPO's
    features_weight: float = 0.1  # of the hidden states' distance beside GKD's
    learning_rate: float = 3e-3
    large: Model = Model(12, 48, 128, 3, 4, 4, 12, max_positions=32)
    small: Model = Model(12, 24, 64, 2, 2, 2, 12, max_positions=32)


class Line(NamedTuple):
    """A line of the table."""

    name: str
    parameters: int
    right: float  # share of tokens
    seconds: float  # of the stage, compiling included


def demonstrate(key: KeyArray, config: Config) -> Demonstrations:
    """A step's prompts, and the largest digit four times over or, where wrong, some other."""
    k_task, k_wrong, k_digit = jr.split(key, 3)
    prompts = draw_tasks(k_task, TASK).prompts
    wrong = jr.uniform(k_wrong, (TASK.prompts,)) < config.wrong
    other = jr.randint(k_digit, (TASK.prompts,), 0, DIGITS, jnp.int32)
    digit = jnp.where(wrong, other, prompts.tokens[:, 1:].max(-1))
    tokens = jnp.broadcast_to(digit[:, None], (TASK.prompts, TASK.length))
    return Demonstrations(prompts, tokens, jnp.full(TASK.prompts, TASK.length, jnp.int32))


def rows_of(shown: Demonstrations) -> Rows:
    """Prompt and completion in a row; the completion is trained."""
    tokens = jnp.concatenate([shown.prompts.tokens, shown.tokens], 1)
    completion = jnp.arange(tokens.shape[1]) >= shown.prompts.tokens.shape[1]
    mask = jnp.broadcast_to(completion, tokens.shape)
    return causal_rows(tokens, shown.prompts.lengths + shown.lengths, mask, capacity=TASK.length)


def share_right(key: KeyArray, model: Decoder, config: Config) -> float:
    """The share of sampled tokens that are right, over held-out prompts."""
    k_task, k_sample = jr.split(key)
    tasks = draw_tasks(k_task, replace(TASK, prompts=config.held_out))
    drawn = generate(k_sample, model, tasks.prompts, Sampling(max_tokens=TASK.length))
    return float(largest(tasks, drawn)[0].mean())


def run(
    key: KeyArray,
    algorithm: Algorithm[Any, Any, Any],
    models: Models,
    data: Callable[[int], Any],
    steps: int,
) -> Models:
    """The models after so many steps."""
    k_init, k_train = jr.split(key)
    state = algorithm.init(k_init, models)
    loop = train(algorithm, state, data, key=k_train, steps=steps, fused=True)
    ((_, state, _),) = deque(loop, maxlen=1)
    return state.models


def policy(models: WithReference[Decoder]) -> Decoder:
    """The one that trains."""
    return models.policy


def main(config: Config) -> list[Line]:
    """Run the stages and print the table."""
    use_compile_cache()
    k_data, k_run, k_test, k_large, k_small = jr.split(jr.key(config.seed), 5)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))
    sampling = Sampling(max_tokens=TASK.length)

    def shown(step: int) -> Demonstrations:
        return demonstrate(jr.fold_in(k_data, step), config)

    def rows(step: int) -> Rows:
        return rows_of(shown(step))

    lines: list[Line] = []

    def stage(name: str, model: Callable[[KeyArray], Decoder]) -> Decoder:
        start = time.perf_counter()
        trained = model(jr.fold_in(k_run, len(lines)))
        seconds = time.perf_counter() - start
        lines.append(Line(name, count(trained), share_right(k_test, trained, config), seconds))
        return trained

    imitate = sft(optimizer)
    large, small = init_decoder(k_large, config.large), init_decoder(k_small, config.small)
    first = stage("SFT", lambda key: run(key, imitate, large, rows, config.steps))

    reinforce = combine(
        Part("rl", grpo(optimizer, single_turn(largest, sampling, group=TASK.group))),
        Part("sft", over(policy, imitate), weight=config.sft_weight),
    )
    both = lambda step: (draw_tasks(jr.fold_in(k_data, step), TASK), rows(step))  # noqa: E731
    second = stage(
        "SFT → RL",
        lambda key: policy(run(key, reinforce, WithReference(first), both, config.steps)),
    )

    distil = combine(
        Part("gkd", gkd(optimizer, sampling)),
        Part("features", feature_pooling(optimizer, alpha=1.0), weight=config.features_weight),
    )
    pair = lambda step: (shown(step), rows(step))  # noqa: E731
    stage(
        "SFT → RL → distilled",
        lambda key: run(key, distil, Distill(small, second), pair, config.steps).student,
    )
    stage("as small, by SFT alone", lambda key: run(key, imitate, small, rows, config.steps))

    print(f"{'model':24}{'parameters':>12}{'right':>8}{'seconds':>9}")
    for line in lines:
        print(f"{line.name:24}{line.parameters:12,}{line.right:8.3f}{line.seconds:9.1f}")
    return lines


if __name__ == "__main__":
    main(replace(Config(), steps=int(sys.argv[1])) if len(sys.argv) > 1 else Config())
