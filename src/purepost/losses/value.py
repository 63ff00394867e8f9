"""The value loss of PPO."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..mean import Metrics, Spans, masked_mean, select
from ..types import Scalar


def clipped_value(
    values: Float[Array, "b t"],
    old_values: Float[Array, "b t"],
    returns: Float[Array, "b t"],
    spans: Spans,
    *,
    clip: Scalar = 0.2,
) -> tuple[Float[Array, "b t"], Metrics]:
    """½ max((V − R)², (clip(V, V_old ± c) − R)²) of every trained token.

    Source: Schulman et al., GAE, 1506.02438, §5 for the loss; the clip is of PPO's published code.
    """
    v, old, r = (select(spans.mask, x) for x in (values, old_values, returns))
    near = jnp.clip(v, old - clip, old + clip)
    plain, bounded = (v - r) ** 2, (near - r) ** 2
    cut = (bounded > plain).astype(jnp.float32)
    return 0.5 * jnp.maximum(plain, bounded), {"value/clip_ratio": masked_mean(cut, spans.mask)}
