"""The wheel in environments of its own, alone and with each extra: installed, used, typed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.licenses import EXTRAS
from tests.packaging.conftest import Built

pytestmark = pytest.mark.timeout(1200)

HERE = Path(__file__).parent
LOCK = HERE.parent.parent / ".ci" / "lock"
SMOKE = {
    "aio": """
import asyncio, aio_pika
from reliablepub import AsyncPublisher
from reliablepub.testing import FakeBroker
async def main():
    async with FakeBroker() as broker:
        broker.declare_queue("q")
        connection = await aio_pika.connect_robust(broker.url)
        async with AsyncPublisher(connection=connection, outbox="aio.db") as publisher:
            await (await publisher.publish(b"...", routing_key="q"))
        await connection.close()
        assert len(broker.messages("q")) == 1
asyncio.run(main())
""",
    "encryption": """
from reliablepub import Message, Outbox, OutboxKeys
keys = OutboxKeys({"2026-11": bytes(32)})
with Outbox("sealed.db", keys=keys) as outbox:
    outbox.enqueue(Message(b"secret", routing_key="q"))
assert b"secret" not in open("sealed.db", "rb").read()
""",
    "observe": """
import prometheus_client
from reliablepub import Publisher
from reliablepub.observe.metrics import Metrics
from reliablepub.testing import FakeBroker
with FakeBroker() as broker:
    broker.declare_queue("q")
    metrics = Metrics("shop")
    with Publisher(broker.url, outbox="observed.db", hooks=[metrics]) as publisher:
        publisher.publish(b"...", routing_key="q").result(timeout_s=60)
assert b"reliablepub" in prometheus_client.generate_latest()
""",
    "spark": """
from pyspark.sql import SparkSession
from reliablepub.testing import FakeBroker
with FakeBroker() as broker:
    broker.declare_queue("q")
    spark = SparkSession.builder.master("local[1]").getOrCreate()
    frame = spark.range(10).selectExpr("string(id) AS value", "'q' AS routing_key")
    frame.write.format("rabbitmq").option("url", broker.url).mode("append").save()
    spark.stop()
    assert len(broker.messages("q")) == 10
""",
}


class Environment:
    """A virtual environment with nothing in it but what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder / "venv" / "bin"
        # Neither this checkout nor its environment may be seen from there.
        self._variables = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        } | {"PATH": f"{self._bin}:{os.environ['PATH']}"}
        self.run(sys.executable, "-m", "venv", str(folder / "venv"))

    def run(self, command: str, *arguments: str, is_checked: bool = True) -> str:
        result = subprocess.run(
            [shutil.which(command, path=self._variables["PATH"]) or command, *arguments],
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not is_checked or result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def install(self, *requirements: str) -> None:
        self.run("pip", "install", "--quiet", *requirements)

    def use_everything(self) -> None:
        self.run("pip", "check")
        assert self.run("reliablepub", "--version") == f"reliablepub {version()}\n"
        for script in ("consumer.py", "commands.py"):
            shutil.copy(HERE / script, self.folder)
            assert self.run("python", "-W", "error", script) == "well\n"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the core dependencies alone, from the lock."""
    environment = Environment(tmp_path_factory.mktemp("bare"))
    environment.install("--require-hashes", "-r", str(LOCK / "base.txt"))
    return environment


def test_the_wheel_alone_runs_every_command(built: Built, bare: Environment) -> None:
    bare.install("--no-deps", "--force-reinstall", str(built.wheel))
    bare.use_everything()


def test_the_source_distribution_runs_every_command(built: Built, bare: Environment) -> None:
    bare.install("--require-hashes", "-r", str(LOCK / "build.txt"))
    bare.install("--no-deps", "--no-build-isolation", "--force-reinstall", str(built.sdist))
    bare.use_everything()


@pytest.mark.soak
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_works_with(extra: str, built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(f"{built.wheel}[{extra}]" if extra else str(built.wheel))
    environment.use_everything()
    environment.run("python", "-c", SMOKE.get(extra, ""))


def version() -> str:
    project = HERE.parent.parent / "pyproject.toml"
    (line,) = (line for line in project.read_text().splitlines() if line.startswith("version = "))
    return line.split('"')[1]


@pytest.mark.soak
def test_type_checkers_know_the_public_names_from_outside(built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(str(built.wheel), "mypy", "basedpyright")
    shutil.copy(HERE / "consumer.py", tmp_path)
    environment.run("mypy", "--strict", "consumer.py")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    environment.run("basedpyright", "--level", "error", "consumer.py")
