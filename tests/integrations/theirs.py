"""Runs the frameworks' own tests for publishing, first as they are, then with our producer.

    python -m tests.integrations.theirs FOLDER...

Each folder is the source of Celery, dramatiq or taskiq-aio-pika, of the version that is installed:
an unpacked sdist, or a checkout where the sdist has no complete tests. It is copied, not changed. A
private RabbitMQ is started. Prints a table, and why a test passes with their producer alone. Ends
with 1 if one is not among the `DIFFERENCES`.

Celery's integration tests need Redis: they run if `TEST_BACKEND` is its URL, such as
``redis://localhost:6379``, and `REDIS_PORT` says its port. They take half an hour.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

from tests.rabbitmq import RabbitMQNode
from tests.speed.measuring import print_table

HERE = Path(__file__).parent
PLUGIN = "theirs_plugin"


@dataclass(frozen=True)
class Suite:
    """Tests of a framework.

    Attributes:
        framework: its name, as the plugin knows it.
        tests: files and folders, of which at least the first exists in the source.
    """

    framework: str
    tests: tuple[str, ...]


SUITES = (
    Suite("celery", ("t/integration/test_tasks.py", "t/integration/test_canvas.py")),
    Suite(
        "celery-memory",
        (
            *("t/unit/app/test_amqp.py", "t/unit/app/test_app.py", "t/unit/app/test_beat.py"),
            *("t/unit/tasks/test_tasks.py", "t/unit/tasks/test_canvas.py"),
            *("t/unit/tasks/test_chord.py", "t/unit/tasks/test_stamping.py"),
        ),
    ),
    Suite("dramatiq", ("tests/test_rabbitmq.py",)),
    Suite("taskiq", ("tests/test_routing.py", "tests/test_delay.py", "tests/test_startup.py")),
)


NO_EVENT = "expects the event task-sent, which is not sent"
BY_WORKER = (
    "expects a process that only sends tasks to declare exchange and queues; the worker does"
)
DIFFERENCES = {
    "celery": {
        r"test_task_sent_event_respects_publish_retry_limit": NO_EVENT,
        r"test_replaced_task_nesting_level_0": (
            "has to go on before the task runs, and the plugin waits until it was sent"
        ),
    },
    "celery-memory": {
        r"test_send_(event_exchange_string|task_sent_event)": NO_EVENT,
        r"test_send_task_message__broadcast_without_exchange": NO_EVENT,
        r"_publish_retry_keeps_the_ready_header": (
            "expects a second try after a refused connection, and storing needs no connection"
        ),
    },
    "dramatiq": {
        r"_stops_retrying_declaring_queues_when": "expects an error while the broker is down",
        r"_reconnects_after_enqueue_failure": "expects that sending a task opens a connection",
        r"_re_declares_queues_when": (
            "expects that sending a task declares its queue; a relay or a worker does"
        ),
    },
    "taskiq": {r"test_startup\.TestStartup\.": BY_WORKER},
}
"""Why a test fails with our producer, by suite and name."""


def difference(suite: Suite, name: str) -> str | None:
    """Why this test is to fail with our producer; None if it should pass."""
    known = DIFFERENCES.get(suite.framework, {})
    return next((why for pattern, why in known.items() if re.search(pattern, name)), None)


def outcomes(suite: Suite, copy: Path, url: str, *, is_ours: bool) -> dict[str, str]:
    """The outcome of each test, by its name: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:randomly", "-q"]
        command += ["-p", "no:reliablepub", "-o", "addopts=", "--timeout=60"]
        command += [
            "--color=no",
            f"--config-file={copy / 'pyproject.toml'}",
            f"--junit-xml={report}",
            *suite.tests,
        ]
        if suite.framework.startswith("celery"):
            command += ["-p", "celery.contrib.pytest"]
        told = {
            "THEIRS": suite.framework,
            "THEIRS_OUTBOX": str(Path(folder, "outbox.db")) if is_ours else "",
            "THEIRS_URL": url,
            "TEST_BROKER": url,
            "TEST_AMQP_URL": url,
            "PYTHONPATH": f"{HERE}:{copy}:{environ.get('PYTHONPATH', '')}",
        }
        with (copy / f"{suite.framework}-{is_ours}.log").open("wb") as log:
            subprocess.run(command, cwd=copy, env=environ | told, stdout=log, check=False)
        return {
            f"{case.get('classname')}.{case.get('name')}": _outcome(case)
            for case in ET.parse(report).iter("testcase")
        }


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def copied(source: Path, folder: Path, port: int) -> Path:
    """A copy of the tests, in which the broker's port is that of the private one."""
    copy = folder / source.name
    tests = "t" if (source / "t").is_dir() else "tests"
    shutil.copytree(source / tests, copy / tests)
    shutil.copy(source / "pyproject.toml", copy)  # their options for pytest
    for path in (copy / tests).rglob("*.py"):
        path.write_text(re.sub(r"(127\.0\.0\.1|localhost):5672\b", rf"\1:{port}", path.read_text()))
    return copy


def rows(sources: Sequence[Path], node: RabbitMQNode, folder: Path) -> Iterator[tuple[str, ...]]:
    port = urlsplit(node.url).port
    assert port is not None
    for source in sources:
        copy = copied(source, folder, port)
        for suite in SUITES:
            needs_redis = suite.framework == "celery" and "TEST_BACKEND" not in environ
            if needs_redis or not (copy / suite.tests[0]).exists():
                continue
            theirs = outcomes(suite, copy, node.url, is_ours=False)
            ours = outcomes(suite, copy, node.url, is_ours=True)
            passed = {name for name, outcome in theirs.items() if outcome == "passed"}
            lost = sorted(name for name in passed if ours.get(name) != "passed")
            unexpected = 0
            for name in lost:
                why = difference(suite, name)
                unexpected += why is None
                print(f"{suite.framework}: {ours.get(name)}: {name}: {why or 'UNEXPECTED'}")
            counts = (len(theirs), len(passed), len(passed) - len(lost), unexpected)
            yield (suite.framework, *map(str, counts))


def main() -> None:
    with RabbitMQNode() as node:
        folder = tempfile.mkdtemp()
        print("their output is in", folder)
        sources = [Path(name).absolute() for name in sys.argv[1:]]
        table = list(rows(sources, node, Path(folder)))
    head = ("suite", "tests", "pass with their producer", "and with ours", "unexpected")
    print_table(head, table)
    unexpected = sum(int(row[-1]) for row in table)
    print(f"{unexpected or 'no'} unexpected differences")
    sys.exit(unexpected > 0)


if __name__ == "__main__":
    main()
