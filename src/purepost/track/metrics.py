"""Metrics as plain numbers."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..mean import Mean, Metrics

QUANTILES = "/quantiles"  # how the name of such a metric ends

Record = dict[str, float | list[float]]


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
