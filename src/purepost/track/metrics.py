"""Metrics as plain numbers, and distributions as quantiles."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..mean import Mean, Metrics

# The quantiles that stand for a distribution: its ends, its middle, and bands of 80 % and 50 %.
LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
QUANTILES = "/quantiles"  # how the name of such a metric ends

Record = dict[str, float | list[float]]


def quantiles(x: Float[Array, "*s"], mask: Bool[Array, "*s"] | None = None) -> Mean:
    """The `LEVELS` of a distribution as one metric, to be named "<what>/quantiles".

    Linear between order statistics. Nothing under the mask: weight 0.
    """
    weight = jnp.ones((), jnp.float32)
    if mask is not None:
        weight = mask.any().astype(jnp.float32)
        x = jnp.where(mask, x, jnp.nan)
    levels = jnp.asarray(LEVELS, jnp.float32)
    total = jnp.nanquantile(x.astype(jnp.float32).reshape(-1), levels)
    return Mean(jnp.where(weight > 0, total, 0.0), weight)


def to_floats(metrics: Metrics) -> Record:
    """The values of metrics as floats, lists of floats for vectors: one transfer for all.

    A metric of weight 0 has no value and is left out.
    """
    on_host: dict[str, Mean] = jax.device_get(metrics)
    record: Record = {}
    for name, mean in on_host.items():
        weight = np.asarray(mean.weight, np.float32)
        if np.all(weight == 0):
            continue
        empty = weight == 0
        total = np.asarray(mean.total, np.float32)
        value = np.where(empty, np.float32(0), total / np.where(empty, np.float32(1), weight))
        record[name] = value.tolist()
    return record


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for what is not finite: JSON knows no NaN."""

    def mend(value: Any) -> Any:
        if isinstance(value, list):
            return [mend(x) for x in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: mend(value) for name, value in record.items()}
