"""Trained models as rewards."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..mean import Metrics
from ..models.heads import SequenceClassifier, ValueHead
from ..rollout.collect import Reward, Tasks
from ..rollout.sample import Completions
from ..types import Rows, group_rows

# (log-probability that each step is right, where steps end) → a completion's reward
Combine = Callable[[Float[Array, "p g t"], Bool[Array, "p g t"]], Float[Array, "p g"]]


def model_reward(model: SequenceClassifier, *, score: int = 0) -> Reward:
    """One of a classifier's scores, by default the only one of a reward model."""
    if not 0 <= score < model.head.shape[1]:
        raise ValueError(f"expected 0 ≤ score < {model.head.shape[1]}, got {score}")

    def reward(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
        return _classify(model, _rows(tasks, completions))[..., score], {}

    return reward


def product(log_right: Float[Array, "p g t"], ends: Bool[Array, "p g t"]) -> Float[Array, "p g"]:
    """The probability that all steps are right. Source: Lightman et al., 2305.20050, §2.6."""
    return jnp.exp(jnp.where(ends, log_right, 0.0).sum(-1))


def least(log_right: Float[Array, "p g t"], ends: Bool[Array, "p g t"]) -> Float[Array, "p g"]:
    """The probability that the worst step is right."""
    return jnp.exp(jnp.where(ends, log_right, 0.0).min(-1))


def process_reward(
    model: ValueHead, separators: tuple[int, ...], *, combine: Combine = product
) -> Reward:
    """What a process reward model says of a completion's steps, each of which ends with one of
    the `separators` (token ids). A completion without one is unscored.
    """
    if not separators:
        raise ValueError("expected the ids of tokens that end a step, got none")

    def reward(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
        rows = _rows(tasks, completions)
        shape, trunk = completions.tokens.shape, tasks.prompts.tokens.shape[1]
        logits = _after(model, rows)[:, trunk:].reshape(shape)
        ids = jnp.asarray(separators, completions.tokens.dtype)
        ends = (completions.tokens[..., None] == ids).any(-1) & completions.mask
        rewards = combine(jax.nn.log_sigmoid(logits), ends)
        return jnp.where(ends.any(-1), rewards, jnp.nan), {}

    return reward


def _rows(tasks: Tasks, completions: Completions) -> Rows:
    """A row for each prompt, its completions behind it."""
    prompts = tasks.prompts
    return group_rows(
        prompts.tokens, prompts.lengths, completions.tokens, completions.lengths, completions.mask
    )


@eqx.filter_jit
def _classify(model: SequenceClassifier, rows: Rows) -> Float[Array, "b e n"]:
    return model(rows)


@eqx.filter_jit
def _after(model: ValueHead, rows: Rows) -> Float[Array, "b t"]:
    return model.after(rows)
