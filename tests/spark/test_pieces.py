"""The name that an error gives to a row, without Spark."""

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest

from spark_sink.failures import RowsNotConfirmed
from spark_sink.pieces import Pieces, _shown
from spark_sink.schema import Columns, Key
from spark_sink.task import Failure


def test_a_key_that_python_cannot_show_hides_no_error() -> None:
    times = pa.array([0], pa.timestamp("us", "Mars/Olympus"))
    assert _shown(times, 0) == "(unreadable)"
    assert "1970" in _shown(times.cast(pa.timestamp("us", "GMT+3")), 0)


def test_a_body_that_is_the_key_is_not_shown() -> None:
    pieces = Pieces(0, None)
    pieces.add(0, pa.RecordBatch.from_pydict({"value": ["a body"], "order_id": [4711]}))
    keys = (Key("value", 0, "string"), Key("order_id", 1, "integer"))
    failure = Failure(0, "id", "unroutable", 312, "NO_ROUTE")
    error = RowsNotConfirmed(partition=0, **asdict(failure))
    columns = Columns({"value": 0}, {}, is_json=False, keys=keys)
    named = pieces.named(error, columns, None, "w", [failure])
    assert "(order_id=4711, message id)" in str(named)
    assert "a body" not in str(named)


def test_a_row_is_not_kept_in_a_folder_that_no_other_host_sees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error would name a file that the operator does not find."""
    pieces = Pieces(0, None)
    pieces.add(0, pa.RecordBatch.from_pydict({"value": ["a body"]}))
    failure = Failure(0, "id", "unroutable", 312, "NO_ROUTE")
    error = RowsNotConfirmed(partition=0, **asdict(failure))
    folder = tmp_path / "report"
    named = pieces.named(
        error, Columns({"value": 0}, {}, is_json=False), str(folder), "w", [failure]
    )
    assert str(named) == str(error)
    assert "all hosts must share it" in caplog.text
    assert not folder.exists()
