"""A stream whose driver is killed in the middle of its batches, and started again."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe
from tests.spark.drained import arrived, assert_once_by_id, drained
from tests.spark.processes import drivers, kill

pytestmark = [pytest.mark.rabbit, pytest.mark.soak, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parent.parent.parent
FILES, LINES = 20, 1_000
KILLS_AT = (1_000, 5_000, 9_000, 13_000, 17_000)


def test_a_stream_whose_driver_is_killed(rabbitmq: AmqpProbe, tmp_path: Path) -> None:
    """Two files make a batch, of two partitions; at this pace it takes two seconds."""
    queue = rabbitmq.declare_queue()
    source = tmp_path / "source"
    source.mkdir()
    for n in range(FILES):
        lines = (f"{n}-{line}" for line in range(LINES))
        (source / f"{n:02}.txt").write_text("\n".join(lines) + "\n")
    options = {
        "url": rabbitmq.url,
        "routing_key": queue,
        "maxConnections": "2",
        "maxRowsPerSecond": "1000",
    }
    command = [
        *(sys.executable, "-m", "tests.spark.stream_job"),
        *(f"--source={source}", f"--checkpoint={tmp_path / 'checkpoint'}"),
        *(f"--option={name}={value}" for name, value in options.items()),
    ]
    for number in KILLS_AT:
        query = start(command)
        while arrived(rabbitmq.url, queue) < number:
            assert query.poll() is None, query.communicate()[0]
            time.sleep(0.05)
        assert kill(drivers(query.pid)) == 1
        output, _ = query.communicate()
        assert query.returncode != 0, output
    query = start(command)
    output, _ = query.communicate()
    assert query.returncode == 0, output
    found = drained(rabbitmq.url, queue, quiet_s=1.0)
    expected = Counter(f"{n}-{line}".encode() for n in range(FILES) for line in range(LINES))
    assert_once_by_id(found, expected)
    print(f"{len(KILLS_AT)} kills, {len(found) - FILES * LINES} duplicates")
    assert len(found) > FILES * LINES


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
