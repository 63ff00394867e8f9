"""Data files as rows by index: JSON Lines, Parquet, and directories that `datasets` wrote."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

# (row → its columns, row → what errors call it, number of rows)
Opened = tuple[Callable[[int], Any], Callable[[int], str], int]

JSON_LINES = (".jsonl", ".ndjson", ".json")
GROUPS = 8  # row groups of a Parquet file that are kept in memory


def open_file(path: Path) -> Opened:
    """The rows of a file or directory, by the end of its name.

    Raises: FileNotFoundError; ValueError for a name, or a content, that is not known.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a data file or directory {path}, found none")
    if path.is_dir():
        return _directory(path)
    if path.suffix in JSON_LINES:
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise ValueError(
        f"expected a file named .jsonl or .parquet, got {path}; convert it, or pass a list of dicts"
    )


def _json_lines(path: Path) -> Opened:
    """One JSON object a line; only where lines begin is kept. Blank lines are no rows."""
    starts, numbers, at = [], [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip(b" \t\r\n\xef\xbb\xbf"):
                starts.append(at)
                numbers.append(number)
            at += len(line)
    start, line_number = np.asarray(starts, np.int64), np.asarray(numbers, np.int64)

    def fetch(i: int) -> Any:
        with path.open("rb") as file:
            file.seek(int(start[i]))
            return _json(file.readline())

    def where(i: int) -> str:
        return f"{path}, row {i} (line {line_number[i]})"

    return fetch, where, len(start)


def _json(line: bytes) -> Any:
    """The value of one line."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, got {error}; convert the file") from error
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("expected JSON of some depth, got brackets without end") from error
    except ValueError as error:
        raise ValueError(
            f"expected a JSON object on one line, got {text.strip()!r:.60}: {error}"
        ) from error


def _parquet(path: Path) -> Opened:
    """Rows by their row group; the last few groups are kept."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise _missing("pyarrow") from error
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"expected a Parquet file, got {path}: {error}") from error
    sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
    ends = np.cumsum(sizes, dtype=np.int64)

    @lru_cache(maxsize=GROUPS)
    def group(g: int) -> pa.Table:
        return file.read_row_group(g)

    def fetch(i: int) -> Any:
        g = int(np.searchsorted(ends, i, side="right"))
        try:
            (row,) = group(g).slice(i - int(ends[g]) + sizes[g], 1).to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"expected a whole Parquet file, got {error}; write it again"
            ) from error
        return without_absent(row)

    return fetch, lambda i: f"{path}, row {i}", sum(sizes)


def _directory(path: Path) -> Opened:
    """What `save_to_disk` of `datasets` wrote."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise ValueError(f"expected one split, got {path} with {splits}; read one: {path / '...'}")
    if not (path / "state.json").exists():
        files = sorted(p.name for p in path.iterdir())[:5]
        raise ValueError(
            f"expected a directory written by datasets' save_to_disk, got {path} with {files}; "
            "name the data files themselves: read(a, b)"
        )
    try:
        import datasets
    except ImportError as error:
        raise _missing("datasets") from error
    try:
        rows = datasets.Dataset.load_from_disk(str(path))
    except Exception as error:  # of many kinds, for files that are damaged
        raise ValueError(f"expected a dataset in {path}, got {error}; save it again") from error
    return lambda i: without_absent(rows[i]), lambda i: f"{path}, row {i}", len(rows)


def _missing(package: str) -> ImportError:
    return ImportError(
        f"expected the package {package}, found none; pip install 'purepost[data]'", name=package
    )


def without_absent(value: Any) -> Any:
    """A row of a columnar format without the keys whose value is None.

    There, rows share one structure, and None stands for what a row did not have.
    """
    match value:
        case dict():
            return {k: without_absent(x) for k, x in value.items() if x is not None}
        case list():
            return [without_absent(x) for x in value]
    return value
