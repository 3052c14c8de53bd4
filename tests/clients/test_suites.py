"""Results of a suite are read and compared test by test."""

from pathlib import Path

from tests.clients.suites import differences, read_junit

WRITTEN = """\
<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="no"/></testcase>
<testcase classname="a" name="broken"><error message="in a fixture"/></testcase>
<testcase classname="a" name="skipped"><skipped/></testcase>
<testcase classname="a" name="good"><failure/></testcase>
</testsuite></testsuites>
"""


def test_results_are_read_and_equal_names_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    path.write_text(WRITTEN)
    assert read_junit(path) == {
        "a::good": "passed",
        "a::bad": "failed",
        "a::broken": "failed",
        "a::skipped": "skipped",
        "a::good (2)": "failed",
    }


def test_a_test_that_ran_on_one_broker_only_is_a_difference() -> None:
    fake = {"same": "passed", "other": "passed"}
    real = {"same": "passed", "other": "failed", "more": "passed"}
    assert differences(fake, fake) == []
    assert differences(fake, real) == [
        "more: not run on the fake, passed on RabbitMQ",
        "other: passed on the fake, failed on RabbitMQ",
    ]
