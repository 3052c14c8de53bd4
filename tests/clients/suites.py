"""A client's own test suite on both brokers, compared test by test.

`python -m tests.clients.suites NAME` runs the suite of a client on the fake broker and on a private
RabbitMQ, and ends with 1 if a test has another result on one of them. Sources without tests (npm's
tarballs, some of PyPI) are given as a checkout with `--source`. To add a client, add a `Suite` to
`SUITES`; results are read from JUnit's XML.

It must never know what a test is about.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import environ
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import click

from reliablepub.testing import FakeBroker
from tests.rabbitmq import RabbitMQNode

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".client-suites"
REPLACED = Path(__file__).parent / "replaced"
DEFAULT_PORT = "5672"
TIMEOUT_S = 1800
BODY_MAX = 128 * 1024 * 1024  # RabbitMQ's own default, and the fake broker's
PYTEST = ("{python}", "-m", "pytest", "-q", "--junitxml={results}")
NODE = ("node", "--test", "--test-reporter=junit", "--test-reporter-destination={results}")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """How the suite of a client is set up and run.

    Attributes:
        source: Where a checkout comes from; unused where `sdist` names one with tests.
        sdist: A requirement, as `amqp==5.4.2`, whose source distribution on PyPI has the tests.
        python: What pip installs into a virtual environment; for a client in Python.
        npm: Whether `npm install` prepares the source.
        command: What runs it, in the directory of the source.
        environment: Variables of the command.
        port_in: Files that name the port 5672, which is replaced there.
        replaced: Files of the source, and what replaces each, of the directory `replaced`.
        left_out: Arguments of the command that leave tests out, and why.
    """

    source: str
    sdist: str = ""
    python: tuple[str, ...] = ()
    npm: bool = False
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port_in: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


AMQP_HOST = {"RABBITMQ_HOST": "127.0.0.1", "RABBITMQ_5672_TCP": "{port}"}

SUITES: Mapping[str, Suite] = {
    "pika": Suite(
        source="github.com/pika/pika",
        python=("{source}", "gevent", "pytest", "pytest-timeout", "tornado", "twisted"),
        command=(*PYTEST, "tests/acceptance/*_adapter_test*.py", "tests/acceptance/enforce_*.py"),
        port_in=(
            "tests/base/async_test_base.py",
            "tests/acceptance/blocking_adapter_test.py",
            "tests/misc/forward_server.py",
        ),
    ),
    "aio-pika": Suite(
        source="github.com/mosquito/aio-pika",
        sdist="aio-pika==10.2.1",
        python=("{source}", "aiomisc", "aiomisc-pytest", "pytest", "pytest-rst", "shortuuid"),
        command=(*PYTEST, "tests"),
        environment={"BROKER_PORT": "{port}"},
        replaced={"tests/docker_client.py": "aio_pika_docker_client.py"},
        left_out={
            "--ignore=tests/test_amqps.py": "wants the certificates of its container",
            "--ignore=tests/test_robust_recovery.py": "stops its container",
        },
    ),
    "faststream": Suite(
        source="github.com/ag2ai/faststream",
        python=(
            "{source}[rabbit,otel,prometheus,cli]",
            "dirty-equals",
            "fastapi",
            "freezegun",
            "httpx",
            "pydantic-settings",
            "pytest",
            "pytest-asyncio",
            "pytest-rerunfailures",
            "pytest-timeout",
        ),
        command=(*PYTEST, "-m", "rabbit and connected", "tests/brokers/rabbit"),
        port_in=(
            "faststream/rabbit/broker/broker.py",
            "faststream/rabbit/fastapi/fastapi.py",
            "tests/brokers/rabbit/conftest.py",
        ),
        left_out={
            "--ignore=tests/brokers/rabbit/test_misconfigure.py": "wants clients of other brokers"
        },
    ),
    "py-amqp": Suite(
        source="github.com/celery/py-amqp",
        sdist="amqp==5.4.2",
        python=("{source}", "pytest", "pytest-rerunfailures"),
        command=(*PYTEST, "t/integration"),
        environment=AMQP_HOST,
        left_out={"-knot tls": "wants the certificates of the repository"},
    ),
    "kombu": Suite(
        source="github.com/celery/kombu",
        sdist="kombu==5.7.0",
        python=("{source}", "pytest", "pytest-rerunfailures"),
        command=(*PYTEST, "t/integration/test_py_amqp.py"),
        environment=AMQP_HOST,
    ),
    "rabbitmq-client": Suite(
        source="github.com/cody-greene/node-rabbitmq-client",
        npm=True,
        command=("node", "-r", "ts-node/register", *NODE[1:], "test/*.ts"),
        environment={"RABBITMQ_URL": "{url}"},
        port_in=("test/behavior.ts",),
    ),
    "amqplib": Suite(
        source="github.com/amqp-node/amqplib",
        npm=True,
        command=(*NODE, "test/*.test.js"),
        environment={"URL": "{url}"},
        port_in=("lib/connect.js",),
    ),
}


class NotSetUpError(Exception):
    """The suite cannot be run; the text says what to do."""


# ---------------------------------------------------------------------- setting up


def prepared(name: str, source: Path | None) -> Path:
    """The directory of a client with its source and what it needs; made when there is none."""
    suite, folder = SUITES[name], CACHE / name
    tree = folder / "source"
    if source is None and not tree.exists() and not suite.sdist:
        raise NotSetUpError(f"no release of it has the tests: --source CHECKOUT of {suite.source}")
    if source is not None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, tree, symlinks=True)
    elif not tree.exists():
        _unpack(suite.sdist, tree)
    if (folder / "ready").exists():
        return folder
    if suite.npm:
        _run(tree, "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts")
    if suite.python:
        _run(folder, sys.executable, "-m", "venv", str(folder / "venv"))
        wanted = [one.format(source=tree) for one in suite.python]
        _run(folder, str(folder / "venv" / "bin" / "pip"), "install", "--quiet", *wanted)
    for path, replacement in suite.replaced.items():
        shutil.copy(REPLACED / replacement, tree / path)
    (folder / "ready").touch()
    return folder


def _unpack(sdist: str, tree: Path) -> None:
    name = sdist.partition("==")[0]
    with tempfile.TemporaryDirectory() as where:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        _run(ROOT, *pip, "--no-binary", name, "--dest", where, sdist)
        (archive,) = Path(where).iterdir()
        with tarfile.open(archive) as tar:
            tar.extractall(where, filter="data")
        (top,) = (one for one in Path(where).iterdir() if one.is_dir())
        shutil.copytree(top, tree, symlinks=True)


def _run(where: Path, *command: str) -> None:
    subprocess.run(command, cwd=where, check=True)


# ---------------------------------------------------------------------- running


def results_on(url: str, name: str, folder: Path) -> dict[str, str]:
    """The result of each test of a suite on the broker at a URL."""
    suite, tree = SUITES[name], folder / "source"
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    words = {
        "url": url,
        "port": str(urlsplit(url).port),
        "python": str(folder / "venv" / "bin" / "python"),
        "results": str(results),
    }
    command = [
        part
        for one in (*suite.command, *suite.left_out)
        for part in _expanded(one.format_map(words), tree)
    ]
    variables = {key: value.format_map(words) for key, value in suite.environment.items()}
    with _port_replaced(tree, suite.port_in, words["port"]), (folder / "output.txt").open("w") as o:
        subprocess.run(
            command,
            cwd=tree,
            env={**environ, **variables},
            check=False,
            timeout=TIMEOUT_S,
            stdout=o,
            stderr=subprocess.STDOUT,
        )
    if not results.exists():
        raise NotSetUpError(f"it wrote no results: see {folder / 'output.txt'}")
    return read_junit(results)


def _expanded(part: str, tree: Path) -> list[str]:
    """A part of a command; one with a star stands for the files that match it."""
    if "*" not in part:
        return [part]
    return sorted(str(path.relative_to(tree)) for path in tree.glob(part))


@contextmanager
def _port_replaced(tree: Path, names: tuple[str, ...], port: str) -> Iterator[None]:
    originals = {tree / name: (tree / name).read_text() for name in names}
    try:
        for path, text in originals.items():
            path.write_text(text.replace(DEFAULT_PORT, port))
        yield
    finally:
        for path, text in originals.items():
            path.write_text(text)


def read_junit(path: Path) -> dict[str, str]:
    """The result of each test: `passed`, `failed` or `skipped`.

    Several of one name are numbered, in their order. An error in a fixture is a failure.
    """
    results: dict[str, str] = {}
    seen: Counter[str] = Counter()
    root = ET.parse(path).getroot()
    for case in root.iter("testcase"):
        test = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        seen[test] += 1
        if seen[test] > 1:
            test = f"{test} ({seen[test]})"
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        results[test] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
    return results


# ---------------------------------------------------------------------- comparing


def differences(fake: Mapping[str, str], real: Mapping[str, str]) -> list[str]:
    """A line for each test whose results are not the same."""
    return [
        f"{test}: {fake.get(test, 'not run')} on the fake, {real.get(test, 'not run')} on RabbitMQ"
        for test in sorted(fake.keys() | real.keys())
        if fake.get(test) != real.get(test)
    ]


@click.command()
@click.argument("name", type=click.Choice(list(SUITES)))
@click.option("--source", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(name: str, source: Path | None) -> None:
    """Run the suite of a client on both brokers; exit with 1 if the results differ."""
    try:
        folder = prepared(name, source)
        found = {}
        with ExitStack() as stack:
            urls = {
                "fake": stack.enter_context(FakeBroker()).url,
                "RabbitMQ": stack.enter_context(RabbitMQNode(max_message_size=BODY_MAX)).url,
            }
            for title, url in urls.items():
                found[title] = results_on(url, name, folder)
                counts = Counter(found[title].values())
                said = ", ".join(f"{counts[one]} {one}" for one in sorted(counts))
                click.echo(f"{name} on {title}: {said}")
    except NotSetUpError as error:
        raise click.ClickException(str(error)) from error
    for argument, why in SUITES[name].left_out.items():
        click.echo(f"left out by {argument}: {why}")
    different = differences(found["fake"], found["RabbitMQ"])
    click.echo("\n".join(different) if different else "no differences")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
