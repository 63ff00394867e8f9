"""Batches: a pure function of the step, made of examples that were encoded once."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..rollout.sample import bucket
from ..types import Rows
from .examples import Tree
from .order import Draw, shuffled
from .pack import lay
from .records import Records
from .schema import Example, parse

Data = TypeVar("Data")


@dataclass(frozen=True)
class Report:
    """What became of the records."""

    records: int
    dropped: int  # had nothing left to train, or a prompt that does not fit
    cut: int  # trained tokens did not fit
    tokens: int
    trained: int  # tokens

    def __str__(self) -> str:
        return (
            f"{self.records - self.dropped} examples of {self.records} records: {self.tokens} "
            f"tokens, {self.trained} of them trained; {self.cut} cut, {self.dropped} dropped"
        )


@dataclass(frozen=True)
class Batches(Generic[Data]):
    """step → the batch it trains on: what `train` takes as data.

    Every epoch, of `steps_per_epoch` steps, has every example once, in an order of its own.
    """

    draw: Callable[[int], Data]
    steps_per_epoch: int
    hash: str  # of ids, masks and labels, for the manifest
    report: Report

    def __call__(self, step: int) -> Data:
        """The batch of a step."""
        return self.draw(step)


@dataclass(frozen=True)
class Encoded:
    """The examples that have something to train, in the records' order."""

    trees: list[Tree]
    report: Report


def encode_all(
    records: Records, encode: Callable[[Any], Tree | None], *kinds: type[Example]
) -> Encoded:
    """Every record as an example.

    Raises: ValueError naming the row that is malformed, or when no example is left.
    """
    found: list[Tree | None] = []
    for i, example in parse(records, *kinds):
        try:
            found.append(encode(example))
        except ValueError as error:
            raise ValueError(f"{records.where(i)}: {error}") from error
    trees = [tree for tree in found if tree is not None]
    if not trees:
        raise ValueError(
            f"expected examples with something to train, got none of {len(found)} records; "
            "give them more width"
        )
    report = Report(
        records=len(found),
        dropped=len(found) - len(trees),
        cut=sum(tree.cut for tree in trees),
        tokens=sum(tree.size for tree in trees),
        trained=sum(tree.trained for tree in trees),
    )
    return Encoded(trees, report)


def draw_rows(
    trees: Sequence[Tree],
    packs: Sequence[Sequence[int]],
    *,
    rows: int,
    seed: int,
    most: int,
    width: int | None = None,
) -> Callable[[int], tuple[Rows, Draw]]:
    """step → rows of `width` tokens, by default of the fewest of some sizes, at most `most`, that
    the batch fits in.

    Rows that fill up an epoch's last batch are empty.
    """
    order = shuffled(len(packs), rows, seed=seed)
    trained = max(sum(trees[i].trained for i in pack) for pack in packs)
    episodes = max(sum(max(len(trees[i].branches), 1) for i in pack) for pack in packs)

    def draw(step: int) -> tuple[Rows, Draw]:
        drawn = order(step)
        chosen = [
            [trees[i] for i in packs[row]] if real else []
            for row, real in zip(drawn.rows, drawn.real, strict=True)
        ]
        longest = max(sum(tree.size for tree in pack) for pack in chosen)
        size = min(bucket(longest), most) if width is None else width
        capacity = min(size, trained)
        return lay(chosen, size, ids=drawn.rows, capacity=capacity, episodes=episodes), drawn

    return draw


def make_batches(
    encoded: Encoded, draw: Callable[[int], Data], count: int, rows: int
) -> Batches[Data]:
    """The batches of examples that lie in `count` rows."""
    return Batches(draw, steps_of(count, rows), digest(encoded.trees), encoded.report)


def steps_of(count: int, batch: int) -> int:
    """Steps until every one was drawn."""
    return -(-count // batch)


def digest(trees: Sequence[Tree]) -> str:
    """A digest of what is trained on: ids, masks, labels, in order."""
    sha = hashlib.sha256()
    for tree in trees:
        sha.update(np.asarray([len(tree.parts), len(tree.labels)], "<i8").tobytes())
        sha.update(np.asarray(tree.labels, "<f8").tobytes())
        for part in tree.parts:
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part.ids.astype("<i4").tobytes() + part.mask.tobytes())
    return sha.hexdigest()
