"""Parts and mixtures of datasets, decided row by row by what a row holds.

A row's side does not depend on where it stands or on what else there is: rows may be added or
moved, and equal rows always stay together.
"""

from .order import hash_of
from .records import Record, Records, concatenate


def split(records: Records, fraction: float, *, seed: int = 0) -> tuple[Records, Records]:
    """(the rows to train on, the held-out rows): `fraction` of the rows are held out, about.

    For the manifest of a run, `hash_of([train.hash(), held_out.hash()])` tells the split.
    Raises: ValueError when nothing is left on one side.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"expected a fraction between 0 and 1, got {fraction}")
    held_out = [_place(record, f"split {seed}") < fraction for record in records]
    train, other = (
        records.select([i for i, out in enumerate(held_out) if out is side])
        for side in (False, True)
    )
    if not len(train) or not len(other):
        raise ValueError(
            f"expected rows on both sides, got {len(train)} and {len(other)}; "
            "take another fraction or seed"
        )
    return train, other


def mix(*parts: tuple[Records, float | int], seed: int = 0) -> Records:
    """Several datasets as one, in which every row of a part stands `weight` times.

    .5 keeps half of its rows, 2.5 has each twice and half of them a third time.
    """
    chosen: list[Records] = []
    for records, weight in parts:
        if not 0 < weight < float("inf"):
            raise ValueError(f"expected weights > 0, got {weight}; leave that dataset out")
        whole, rest = divmod(weight, 1)
        chosen += [records] * int(whole)
        if rest:
            salt = f"mix {seed}"
            some = [i for i, record in enumerate(records) if _place(record, salt) < rest]
            chosen += [records.select(some)] if some else []
    if not chosen:
        raise ValueError("expected rows in the mixture, got none; add datasets or raise weights")
    return concatenate(*chosen)


def _place(record: Record, salt: str) -> float:
    """Where a row falls in [0, 1): uniform over rows, always the same for one."""
    return int(hash_of([salt, record])[:13], 16) / 16**13
