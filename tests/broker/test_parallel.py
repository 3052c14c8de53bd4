"""The pytest plugin: it loads little; with pytest-xdist, brokers are side by side or shared."""

import re
import subprocess
import sys
from pathlib import Path

from reliablepub.testing import FakeBroker, NodeOptions

TESTING = Path(__file__).parents[2] / "docs" / "testing.md"
WORKERS = ("gw0", "gw1")
TESTS = 3  # of each kind

WRITTEN = """
import os
import time
from pathlib import Path

import pika
import pytest

from reliablepub.testing import FakeBroker

{documented}

HERE = Path(__file__).parent


def publish(url):
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("invoices", durable=True)
        channel.basic_publish("", "invoices", b"1", mandatory=True)
        return channel.queue_declare("invoices", passive=True).method.message_count


@pytest.fixture(autouse=True)
def _wait_for_the_other_worker():
    (HERE / worker).touch()
    while not all((HERE / one).exists() for one in {workers}):
        time.sleep(0.01)


@pytest.fixture(scope="session")
def session_broker():
    with FakeBroker() as broker:
        yield broker


@pytest.mark.parametrize("number", range({tests}))
def test_a_broker_for_each_test(fake_broker, number):
    assert publish(fake_broker.url) == 1


@pytest.mark.parametrize("number", range({tests}))
def test_a_broker_for_each_worker(session_broker, number):
    assert publish(session_broker.url) == session_broker.published_count


@pytest.mark.parametrize("number", range({tests}))
def test_one_broker_for_all(number):
    publish(url)
"""


def documented() -> str:
    """The lines of the page that give each worker its virtual host."""
    (block,) = re.findall(
        r"```python\n(import os\n\nworker = .*?)```", TESTING.read_text(), re.DOTALL
    )
    assert isinstance(block, str)
    return block


def test_workers_do_not_meet(tmp_path: Path) -> None:
    with FakeBroker(options=NodeOptions(virtual_hosts=WORKERS)) as shared:
        lines = documented().replace("localhost:5672", f"127.0.0.1:{shared.port}")
        assert str(shared.port) in lines
        code = WRITTEN.format(documented=lines, tests=TESTS, workers=WORKERS)
        (tmp_path / "test_shop.py").write_text(code)
        options = [f"-n{len(WORKERS)}", "--dist=each", "-q", "-rs"]  # each worker has all tests
        command = [sys.executable, "-m", "pytest", *options, "test_shop.py"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"{3 * TESTS * len(WORKERS)} passed" in ended.stdout
        met = [len(shared.messages("invoices", virtual_host=worker)) for worker in WORKERS]
    assert met == [TESTS] * len(WORKERS)


def test_a_run_without_a_broker_loads_none(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_nothing():\n"
        "    assert 'reliablepub.testing.plugin' in sys.modules\n"
        "    assert not {'reliablepub.testing.broker', 'pamqp'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_nothing.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
