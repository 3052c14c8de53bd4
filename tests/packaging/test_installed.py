"""The wheel in environments of its own, alone and with each extra: installed, used, typed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reliablepub import Outbox
from tests.docs.licenses import EXTRAS
from tests.packaging.conftest import Built

pytestmark = pytest.mark.timeout(1200)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LOCK = ROOT / ".ci" / "lock"
PAGES = {
    path.stem: found[1]
    for path in sorted((ROOT / "docs").glob("*.md"))
    if (found := re.search(r"^\$ (pip install '\..*)$", path.read_text(), re.MULTILINE))
}
STORED = "stored.db"
SMOKE = {
    "": "",
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
    "celery": """
import celery
from reliablepub import Outbox
from reliablepub.integrations.celery import use_outbox
app = celery.Celery("shop", broker="amqp://guest:guest@localhost/")
use_outbox(app, Outbox("stored.db"))
app.send_task("send_invoice", [1])
""",
    "dashboard": r"""
import re, subprocess, urllib.request
from reliablepub import Outbox
Outbox("stored.db").enqueue(b"...", routing_key="q")
command = ["reliablepub", "dashboard", "--outbox", "stored.db", "--port", "0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as served:
    try:
        url = re.search(r"http://\S+", served.stderr.readline())[0]
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"stored.db" in browser.open(url).read()
    finally:
        served.terminate()
""",
    "django": """
import django
from django.conf import settings
from django.core.management import call_command
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "stored.db"}
database["OPTIONS"] = {"transaction_mode": "IMMEDIATE"}
settings.configure(
    DATABASES={"default": database},
    INSTALLED_APPS=["reliablepub.integrations.django"],
    RELIABLEPUB={"URL": "amqp://guest:guest@localhost/"},
)
django.setup()
call_command("migrate", verbosity=0)
from reliablepub import Message
from reliablepub.integrations.django import DjangoOutbox
DjangoOutbox().enqueue(Message(b"...", routing_key="q"))
""",
    "dramatiq": """
import dramatiq
from reliablepub import Outbox
from reliablepub.integrations.dramatiq import OutboxBroker
dramatiq.set_broker(OutboxBroker(Outbox("stored.db"), url="amqp://guest:guest@localhost/"))
@dramatiq.actor
def send_invoice(order): ...
send_invoice.send(1)
""",
    "fastapi": """
import asyncio
from starlette.applications import Starlette
from reliablepub import AsyncPublisher
from reliablepub.integrations.starlette import lifespan
publisher = None
def new():
    global publisher
    publisher = AsyncPublisher("amqp://127.0.0.1:1/", outbox="stored.db", close_timeout_s=0)
    return publisher
app = Starlette(lifespan=lifespan(new))
async def main():
    async with app.router.lifespan_context(app):
        await publisher.publish(b"...", routing_key="q")
asyncio.run(main())
""",
    "postgres": """
import sys
from reliablepub import Outbox
outbox = Outbox(sys.argv[1])
outbox.create()
outbox.enqueue(b"...", routing_key="q")
assert outbox.status().open == 1
""",
    "sqlalchemy": """
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from reliablepub import Message, Outbox
from reliablepub.integrations.sqlalchemy import SessionOutbox, immediate_transactions
engine = create_engine("sqlite:///stored.db")
immediate_transactions(engine)
outbox = SessionOutbox(Outbox("stored.db"))
with Session(engine) as session, session.begin():
    outbox.enqueue(Message(b"...", routing_key="q"), within=session)
""",
    "taskiq": """
import asyncio
from reliablepub import Outbox
from reliablepub.integrations.taskiq import OutboxBroker
tasks = OutboxBroker(Outbox("stored.db"), url="amqp://guest:guest@localhost/")
@tasks.task(task_name="send_mail")
async def send_mail(order): ...
async def main():
    await tasks.startup()
    await send_mail.kiq(1)
    await tasks.shutdown()
asyncio.run(main())
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
        } | {"PATH": f"{self._bin}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
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
def test_the_wheel_works_with(
    extra: str, built: Built, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = Environment(tmp_path)
    environment.install(f"{built.wheel}[{extra}]" if extra else str(built.wheel))
    environment.use_everything()
    url = [request.getfixturevalue("postgres_url")] if extra == "postgres" else []
    environment.run("python", "-c", SMOKE[extra], *url)
    if (tmp_path / STORED).exists():
        assert Outbox(tmp_path / STORED).status().open == 1


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES)
def test_in_the_sources_the_first_command_of_a_page_installs_it(
    page: str, built: Built, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    environment.run("tar", "-xf", str(built.sdist))  # as a clone has them
    environment.run("bash", "-ec", f"cd {built.sdist.name.removesuffix('.tar.gz')}; {PAGES[page]}")
    environment.use_everything()


def version() -> str:
    project = ROOT / "pyproject.toml"
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
