"""Files, datasets and lists as records; what is malformed is named by file and row."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.data import Records, concatenate, read
from tests.data.shared import JSON

ROWS = [{"text": "grüße", "n": 1}, {"text": "two", "n": None}, {"text": "three"}]


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    return write(path, *(json.dumps(row) + "\n" for row in rows))


def test_json_lines_by_index(tmp_path: Path) -> None:
    records = read(jsonl(tmp_path / "a.jsonl", ROWS))
    assert len(records) == 3 and list(records) == ROWS
    assert records[2] == records[-1] == ROWS[2]
    with pytest.raises(IndexError):
        records[3]


def test_blank_lines_byte_order_marks_and_windows_line_ends_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    records = read(str(path))
    assert list(records) == [{"text": "a"}, {"text": "b"}]
    assert records.where(1) == f"{path}, row 1 (line 4)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "a JSON object on one line"),
        (b'["a"]', "a record of named columns, got list"),
        (b'"a"', "a record of named columns, got str"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "brackets without end"),
        (b'{"a":' * 80 + b"0" + b"}" * 80, "at most 64 lists and dicts"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"n": ' + b"1" * 5000 + b"}", "a JSON object on one line"),
    ],
)
def test_a_malformed_line_is_named_and_the_others_can_be_read(
    tmp_path: Path, line: bytes, words: str
) -> None:
    records = read(write(tmp_path / "a.jsonl", '{"text": "a"}\n', line, '\n{"text": "b"}\n'))
    assert records[0] == {"text": "a"} and records[2] == {"text": "b"}
    with pytest.raises(ValueError, match=rf"a\.jsonl, row 1 \(line 2\): expected .*{words}"):
        records[1]


def test_parquet_by_row_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [{"role": "assistant", "content": "hi", "name": None}, {"role": "user", "content": "x"}]
    rows = [{"messages": calls, "n": i if i % 2 else None} for i in range(5)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    records = read(path)
    assert len(records) == 5 and [record.get("n") for record in records] == [None, 1, None, 3, None]
    # What a row does not have is not there, whatever the columns of other rows.
    assert records[4] == {
        "messages": [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}]
    }
    whole = path.read_bytes()
    for damaged in (whole[:-10], b"", b"PAR1"):
        with pytest.raises(ValueError, match="expected a Parquet file, got .*a.parquet"):
            read(write(path, damaged))


def test_datasets_and_their_directories(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    expected = [{"text": "grüße", "n": 1}, {"text": "two"}, {"text": "three"}]
    assert list(read(dataset)) == list(read(tmp_path / "one")) == expected
    with pytest.raises(ValueError, match="got a mapping with keys .'test', 'train'."):
        read(dataset.train_test_split(1))
    dataset.train_test_split(1).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match="expected one split, got .*two with .'test', 'train'."):
        read(tmp_path / "two")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no")
    with pytest.raises(ValueError, match="expected a dataset in .*one"):
        read(tmp_path / "one")


def test_anything_with_rows_by_index() -> None:
    import grain

    shuffled = grain.MapDataset.source(ROWS).shuffle(seed=1)
    assert sorted(row["text"] for row in read(shuffled)) == ["grüße", "three", "two"]
    assert grain.MapDataset.source(read(ROWS))[1] == ROWS[1]
    with pytest.raises(ValueError, match="leave `repeat` out"):
        read(shuffled.repeat())
    with pytest.raises(ValueError, match="row 1: expected a record of named columns, got NoneType"):
        read([ROWS[0], None])[1]


def test_parts_selections_and_changes_keep_their_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    records = read(path, [{"text": "four"}], path)
    assert [row["text"] for row in records] == ["grüße", "two", "three", "four"] + [
        "grüße", "two", "three",
    ]  # fmt: skip
    last = records.select([6, 3, 2]).map(lambda row: {"text": row["text"].upper()})
    assert list(last) == [{"text": "THREE"}, {"text": "FOUR"}, {"text": "THREE"}]
    assert last.where(0) == last.where(2) == f"{path}, row 2 (line 3)" and last.where(1) == "row 0"
    assert read(records) is records and concatenate(records) is records


def test_a_changed_row_is_named_once() -> None:
    """However often rows were selected and changed."""
    twice = read([{"a": 1}, 3]).select([1]).map(dict).map(dict)
    with pytest.raises(ValueError, match="^row 1: expected a record"):
        twice[0]


def test_the_hash_tells_rows_and_their_order() -> None:
    records = read(ROWS)
    assert records.hash() == read([dict(reversed(row.items())) for row in ROWS]).hash()
    assert len({r.hash() for r in (records, records.select([1, 0, 2]), records.select([0]))}) == 3


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"b\.jsonl, found none"):
        read(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"named \.jsonl or \.parquet, got .*b\.csv"):
        read(write(tmp_path / "b.csv", "a,b\n"))
    with pytest.raises(ValueError, match="save_to_disk, got .* with .'b.csv'."):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"expected rows in .*b\.jsonl, got none"):
        read(write(tmp_path / "b.jsonl", "\n \n"))
    with pytest.raises(ValueError, match="a dataset with rows, got none"):
        read([])
    with pytest.raises(ValueError, match="a list of rows to read, got none"):
        read()
    with pytest.raises(ValueError, match="expected names as keys, got 1"):
        read([{1: 2}])[0]


@given(st.lists(st.binary(max_size=40) | JSON.map(lambda x: json.dumps(x).encode())))
def test_any_bytes_are_records_or_a_value_error(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory) / "a.jsonl", b"\n".join(lines))
        try:
            records = read(path)
        except ValueError as error:
            assert str(path) in str(error)
            return
        assert isinstance(records, Records)
        for i in range(len(records)):
            try:
                assert isinstance(records[i], dict)
            except ValueError as error:
                assert f"{path}, row {i} (line " in str(error)
