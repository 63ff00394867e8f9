"""Records: rows of named columns, by index, wherever they come from."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .columns import Record
from .files import open_file, without_absent
from .order import hash_of

DEEPEST = 64  # lists and dicts within one another


@runtime_checkable
class RandomAccess(Protocol):
    """What has rows by index: a list of dicts, a `datasets.Dataset`, a `grain.MapDataset`."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """One row."""
        ...


@dataclass(frozen=True)
class Records:
    """Rows of named columns, by index. A row is read when it is asked for."""

    fetch: Callable[[int], Any]
    where: Callable[[int], str]  # what errors call a row: "train.jsonl, row 17 (line 18)"
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Record:
        """One row. Raises: ValueError, naming it, when it is no record of plain values."""
        index = range(self.size)[index]
        try:
            return _checked(self.fetch(index))
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(self.size))

    def select(self, rows: Sequence[int]) -> "Records":
        """Some of the rows, in the order given; errors keep calling them by their first place."""
        kept = np.asarray(rows, np.int64)
        return Records(
            lambda i: self.fetch(int(kept[i])), lambda i: self.where(int(kept[i])), len(kept)
        )

    def map(self, change: Callable[[Record], Record]) -> "Records":
        """Every row changed as it is read: to rename columns, leave some out, make prompts."""
        return Records(lambda i: change(_checked(self.fetch(i))), self.where, self.size)

    def hash(self) -> str:
        """A digest of the rows and their order, for the manifest."""
        return hash_of(self)


def read(*sources: str | Path | RandomAccess) -> Records:
    """The rows of one or several sources, one source after another.

    A source is a file (.jsonl or .parquet), a directory written by `datasets`' `save_to_disk`, or
    anything with rows by index. JSONL and Parquet are read as rows are asked for.
    Raises: FileNotFoundError; ValueError for a source that is malformed or has no rows.
    """
    if not sources:
        raise ValueError("expected a file, a directory or a list of rows to read, got none")
    return concatenate(*map(_read, sources))


def concatenate(*parts: Records) -> Records:
    """The rows of all parts, one part after another."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([part.size for part in parts])

    def place(i: int) -> tuple[Records, int]:
        which = int(np.searchsorted(ends, i, side="right"))
        return parts[which], i - int(ends[which]) + parts[which].size

    def fetch(i: int) -> Any:
        part, row = place(i)
        return part.fetch(row)

    def where(i: int) -> str:
        part, row = place(i)
        return part.where(row)

    return Records(fetch, where, int(ends[-1]))


def _read(source: str | Path | RandomAccess) -> Records:
    if isinstance(source, Records):
        return source
    if isinstance(source, str | Path):
        records = Records(*open_file(Path(source)))
        if not records.size:
            raise ValueError(f"expected rows in {source}, got none; check how it was written")
        return records
    if isinstance(source, Mapping):
        raise ValueError(
            f"expected rows by index, got a mapping with keys {sorted(map(str, source))}; read one "
            "of its values, or a list of dicts"
        )
    if not len(source):
        raise ValueError("expected a dataset with rows, got none; check its path and filters")
    if len(source) == sys.maxsize:
        raise ValueError("expected a dataset with an end, got one that repeats; leave `repeat` out")
    columnar = type(source).__module__.partition(".")[0] == "datasets"

    def fetch(i: int) -> Any:
        return without_absent(source[i]) if columnar else source[i]

    return Records(fetch, "row {}".format, len(source))


def _checked(record: Any) -> Record:
    """The record, if nothing in it would stop tokenizers, templates and digests later."""
    if not isinstance(record, Mapping):
        raise ValueError(
            f"expected a record of named columns, got {type(record).__name__}; "
            "write a row as an object such as {'prompt': ..., 'completion': ...}"
        )
    open_: list[tuple[Any, int]] = [(record, 0)]
    while open_:
        value, depth = open_.pop()
        if depth > DEEPEST:
            raise ValueError(
                f"expected at most {DEEPEST} lists and dicts within one another, got more"
            )
        match value:
            case str():
                _check_text(value)
            case Mapping():
                for key in value:
                    if not isinstance(key, str):
                        raise ValueError(f"expected names as keys, got {key!r}")
                    _check_text(key)
                open_ += ((x, depth + 1) for x in value.values())
            case list() | tuple():
                open_ += ((x, depth + 1) for x in value)
    return dict(record)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected Unicode text, got half of a surrogate pair in {text!r:.60}; write it whole"
        ) from error
