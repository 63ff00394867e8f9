"""From per-token losses to one Mean. Splitting the batch changes neither its value nor its
gradient.

B counts episodes (their weights), T_i the trained tokens of episode i.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..mean import Mean, Spans, select

Aggregate = Callable[[Float[Array, "b t"], Spans], Mean]


def _counted(losses: Float[Array, "b t"], spans: Spans) -> Float[Array, "b t"]:
    """Losses of the trained tokens times their episodes' weights."""
    return select(spans.mask, losses) * spans.spread(spans.weights)


def token_mean(losses: Float[Array, "b t"], spans: Spans) -> Mean:
    """Σ ℓ / Σ_i T_i: every token counts the same. Source: Yu et al., DAPO, 2503.14476, eq. 8."""
    return Mean(_counted(losses, spans).sum(), spans.spread(spans.weights).sum())


def sequence_mean(losses: Float[Array, "b t"], spans: Spans) -> Mean:
    """Σ_i (Σ_t ℓ / T_i) / B. An episode without trained tokens counts in B.

    Source: Shao et al., DeepSeekMath, 2402.03300, eq. 3.
    """
    per_token = spans.spread(spans.weights / jnp.maximum(spans.lengths, 1.0))
    return Mean((select(spans.mask, losses) * per_token).sum(), spans.weights.sum())


def sequence_sum(losses: Float[Array, "b t"], spans: Spans) -> Mean:
    """Σ ℓ / B: the plain policy gradient's sum over time. Source: Williams, REINFORCE, 1992."""
    return Mean(_counted(losses, spans).sum(), spans.weights.sum())


def prompt_mean(losses: Float[Array, "b t"], spans: Spans) -> Mean:
    """The mean over prompts of Σ ℓ / Σ_i T_i in the prompt's group, which a row holds whole: no
    prompt counts for more because its completions are long.
    """
    weights = spans.spread(spans.weights).sum(1)
    per_row = _counted(losses, spans).sum(1) / jnp.maximum(weights, 1.0)
    return Mean(per_row.sum(), (spans.weights > 0).any(1).sum(dtype=jnp.float32))


def constant(max_tokens: int) -> Aggregate:
    """Σ ℓ / (B · L_max), with the configured limit for L_max: no bias by length.

    Source: Liu et al., Dr.GRPO, 2503.20783, §3.2.
    """
    if max_tokens < 1:
        raise ValueError(f"expected max_tokens ≥ 1, got {max_tokens}")

    def aggregate(losses: Float[Array, "b t"], spans: Spans) -> Mean:
        return Mean(_counted(losses, spans).sum(), spans.weights.sum() * max_tokens)

    return aggregate
