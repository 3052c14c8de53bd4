"""Nothing needs an extra but what is made for it, and the consumer uses everything."""

import ast
import inspect
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import reliablepub
from tests.docs.licenses import EXTRAS, brought_by

CONSUMER = Path(__file__).parent / "consumer.py"
COMMANDS = Path(__file__).parent / "commands.py"
# What `import` finds from now on: the standard library, the packages given, and this directory's.
ONLY = """
import sys
allowed = {*sys.stdlib_module_names, "reliablepub", "spark_sink", *sys.argv.pop(1).split(",")}


class Others:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(f"{name} is no core dependency", name=name)


sys.meta_path.insert(0, Others())
"""


def modules(extra: str = "") -> set[str]:
    """What an installation with this extra can import, all the way down its dependencies."""
    brought = brought_by(extra) | brought_by("")
    return {
        module
        for module, distributions in packages_distributions().items()
        if brought & {canonicalize_name(name) for name in distributions}
    }


def run(code: str, extra: str = "") -> subprocess.CompletedProcess[str]:
    """Run in a fresh interpreter that can import nothing but what comes with an extra."""
    return subprocess.run(
        [sys.executable, "-c", ONLY + code, ",".join(modules(extra))],
        cwd=CONSUMER.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def script(path: Path) -> str:
    return f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"


def test_every_public_verb_works_with_the_core_dependencies_alone() -> None:
    result = run(script(CONSUMER))
    assert (result.stdout, result.returncode) == ("well\n", 0), result.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_command_and_public_module_works_with_one_extra_alone(extra: str) -> None:
    if extra == "spark":
        pytest.importorskip("pyspark")  # `make lowest` installs the others
    result = run(script(COMMANDS), extra)
    assert (result.stdout, result.returncode) == ("well\n", 0), result.stderr


@pytest.mark.parametrize("extra", ["aio_pika", "cryptography", "prometheus_client", "pyspark"])
def test_what_belongs_to_an_extra_is_not_a_core_dependency(extra: str) -> None:
    assert "is no core dependency" in run(f"import {extra}").stderr


def test_the_consumer_uses_every_public_verb() -> None:
    tree = ast.parse(CONSUMER.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    doors = (reliablepub.Publisher, reliablepub.AsyncPublisher, reliablepub.Outbox)
    verbs = {verb for door in doors for verb, _ in inspect.getmembers(door)}
    assert {verb for verb in verbs if not verb.startswith("_")} - used == set()


@pytest.mark.parametrize(
    ("kind", "offered"),
    [
        (reliablepub.Receipt, {"add_done_callback", "message_id", "is_settled", "result"}),
        (reliablepub.AsyncReceipt, {"message_id", "is_settled", "result"}),
        (reliablepub.BatchReceipt, {"is_settled", "open", "wait"}),
        (reliablepub.AsyncBatchReceipt, {"is_settled", "open", "wait"}),
        (reliablepub.OutboxKeys, {"read"}),
    ],
)
def test_private_methods_are_not_offered(kind: type, offered: set[str]) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} == offered


@pytest.mark.parametrize(("option", "is_there"), [("-q", True), ("-pno:reliablepub", False)])
def test_the_pytest_plugin_can_be_left_out_and_starts_nothing_by_itself(
    tmp_path: Path,
    option: str,
    is_there: bool,  # noqa: FBT001 - pytest's
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys, threading\n\n\ndef test_it():\n"
        f"    assert ('reliablepub' in sys.modules) is {is_there}\n"
        "    assert threading.active_count() == 1\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", option, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
