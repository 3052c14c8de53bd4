"""What a checkpoint shows of a query's trigger, without Spark."""

from pathlib import Path

import pytest

from reliablepub import ConfigurationError
from spark_sink.trigger import check_checkpoint

MICRO = 'v1\n{"batchWatermarkMs":0}\n5'
CONTINUOUS = 'v1\n\n{"0":5}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a query makes it when it starts; with characters that a URI has otherwise."""
    checkpoint = tmp_path / "check point"
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"..."}')
    return checkpoint


def fill(folder: Path, offsets: list[str], commits: int) -> None:
    for number, text in enumerate(offsets):
        (folder / "offsets" / str(number)).write_text(text)
        (folder / "offsets" / f".{number}.crc").write_text("")
    for number in range(commits):
        (folder / "commits" / str(number)).write_text("v1")


@pytest.mark.parametrize(
    ("offsets", "commits"),
    [
        pytest.param([MICRO], 0, id="the first micro-batch"),
        pytest.param([MICRO] * 12, 11, id="a later one"),
        pytest.param([MICRO] * 2, 0, id="no commit was written"),
    ],
)
def test_a_micro_batch_is_never_refused(folder: Path, offsets: list[str], commits: int) -> None:
    fill(folder, offsets, commits)
    check_checkpoint(str(folder))
    check_checkpoint(folder.as_uri())


@pytest.mark.parametrize(
    ("offsets", "commits"),
    [
        pytest.param([], 0, id="the start of a continuous query"),
        pytest.param([MICRO] * 12, 12, id="behind micro-batches"),
        pytest.param([MICRO, CONTINUOUS], 1, id="its restart"),
        pytest.param([CONTINUOUS] * 3, 0, id="a micro-batch behind epochs"),
    ],
)
def test_what_is_no_micro_batch_is_refused(folder: Path, offsets: list[str], commits: int) -> None:
    fill(folder, offsets, commits)
    for location in (str(folder), folder.as_uri(), f"file:{folder}"):
        words = r"continuous trigger .* a new checkpoint.* its scheme, such as hdfs://"
        with pytest.raises(ConfigurationError, match=words):
            check_checkpoint(location)


def test_what_cannot_be_looked_at_is_left_alone(folder: Path) -> None:
    (folder / "metadata").unlink()  # so it is another host's, or of another file system
    for location in (str(folder), "/no/such/folder", "hdfs://a/b", "s3a://a/b", "dbfs:/a", None):
        check_checkpoint(location)
    check_checkpoint(f"/{'x' * 300}")  # a name that no folder can have
