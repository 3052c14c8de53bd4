"""The driver's log: a line for each write, also without a report and with Spark's own logging."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from reliablepub.testing import FakeBroker
from tests.spark.shipping import ROOT

pytestmark = pytest.mark.timeout(600)  # a Java machine of its own, perhaps beside five other suites


def run(*arguments: str) -> str:
    """Run a program of the tests; all that it writes, and Spark's Java machine."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def lines(output: str) -> list[str]:
    return re.findall(
        r"^\d\d/\d\d/\d\d [\d:]{8} (\w+ reliablepub\.spark: write .*)$", output, re.MULTILINE
    )


@pytest.mark.soak  # a second Java machine; `test_writer` has the line
def test_a_batch(fake: FakeBroker) -> None:
    options = (f"--option=url={fake.url}", "--option=routing_key=q", "--option=writeId=orders-7")
    output = run("tests.spark.job", "--master=local[2,2]", "--rows=50", "--partitions=2", *options)
    [line] = lines(output)
    assert line.startswith(
        "INFO reliablepub.spark: write orders-7: 50 rows in 2 partitions, 50 confirmed, 0 may have "
    )


def test_each_micro_batch(fake: FakeBroker, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for n in range(3):  # two files make a batch
        (source / f"{n}.txt").write_text("a\nb\n")
    output = run(
        "tests.spark.stream_job",
        f"--source={source}",
        f"--checkpoint={tmp_path / 'checkpoint'}",
        f"--option=url={fake.url}",
        "--option=routing_key=q",
    )
    found = [re.search(r"write \S+-(\d+): (\d+) rows in", line) for line in lines(output)]
    assert [match and match.groups() for match in found] == [("0", "4"), ("1", "2")]
