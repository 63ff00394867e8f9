"""Which rows make up the batch of a step: a pure function of the seed and the step."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class Draw:
    """The rows of one step's batch. Where `real` is False, `rows` repeats row 0 with no weight."""

    rows: Int[np.ndarray, " b"]
    real: Bool[np.ndarray, " b"]
    epoch: int


def shuffled(n: int, batch: int, *, seed: int, shuffle: bool = True) -> Callable[[int], Draw]:
    """step → the rows it trains on, out of n, `batch` at a time.

    Every epoch is a permutation of its own; its last batch, if rows run out, is filled up with rows
    of weight 0, so that all batches have one shape. NumPy promises that a Philox bit generator's
    raw stream does not change between versions; the order of sorting it is all that is used.
    """
    if n < 1:
        raise ValueError("expected a dataset with rows, got none; check its path and filters")
    if batch < 1:
        raise ValueError(f"expected batch ≥ 1, got {batch}")
    per_epoch = -(-n // batch)
    cached: dict[int, Int[np.ndarray, " n"]] = {}

    def permutation(epoch: int) -> Int[np.ndarray, " n"]:
        if not shuffle:
            return np.arange(n)
        if epoch not in cached:
            cached.clear()
            stream = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(n)
            cached[epoch] = np.argsort(stream, kind="stable")
        return cached[epoch]

    def draw(step: int) -> Draw:
        if step < 0:
            raise ValueError(f"expected step ≥ 0, got {step}")
        epoch, place = divmod(step, per_epoch)
        rows = permutation(epoch)[place * batch : (place + 1) * batch]
        real = np.arange(batch) < len(rows)
        return Draw(np.pad(rows, (0, batch - len(rows))), real, epoch)

    return draw


def stream(n: int, batch: int, *, seed: int) -> Callable[[int], Int[np.ndarray, " b"]]:
    """step → where its batch lies in the endless row of epochs, each a permutation of n rows:
    epoch · n + row. All batches are full; one may reach into the next epoch.
    """
    if batch < 1:
        raise ValueError(f"expected batch ≥ 1, got {batch}")
    epoch_of = shuffled(n, max(n, 1), seed=seed)

    def draw(step: int) -> Int[np.ndarray, " b"]:
        if step < 0:
            raise ValueError(f"expected step ≥ 0, got {step}")
        epochs, places = np.divmod(step * batch + np.arange(batch, dtype=np.int64), n)
        rows = np.concatenate(
            [epoch_of(e).rows[places[epochs == e]] for e in np.unique(epochs).tolist()]
        )
        return epochs * n + rows

    return draw


def hash_of(rows: Iterable[Any]) -> str:
    """A digest of rows and their order, for the manifest.

    Rows are strings, numbers, dates, bytes, arrays, and lists and dicts of them; else it is a
    TypeError.
    """
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, default=_as_list)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _as_list(x: Any) -> Any:
    if isinstance(x, np.generic | np.ndarray | jax.Array):
        return np.asarray(x).tolist()
    if isinstance(x, date | time | timedelta | Decimal):
        return str(x)
    if isinstance(x, bytes):
        return {"bytes": x.hex()}
    raise TypeError(
        "expected strings, numbers, dates, bytes, arrays, lists and dicts in rows, got "
        f"{type(x).__name__}"
    )
