"""RabbitMQ's Java client hears of the fake broker what it hears of RabbitMQ, class by class.

Janino, which PySpark brings, compiles the program: a JRE is enough.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyspark
import pytest

from reliablepub.testing import FakeBroker
from tests.rabbitmq import RabbitMQNode

PROGRAM = Path(__file__).with_name("java") / "Conversation.java"
JARS = Path(pyspark.__file__).parent / "jars"
OTHERS = ("janino", "commons-compiler", "slf4j-api")
TIMEOUT_S = 100


def started(client: Path, url: str) -> subprocess.Popen[str]:
    jars = [client, *(jar for name in OTHERS for jar in JARS.glob(f"{name}-*.jar"))]
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", ":".join(map(str, jars))]
    command += ["org.codehaus.janino.SimpleCompiler", str(PROGRAM), "Conversation", url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def heard(program: subprocess.Popen[str]) -> list[str]:
    output, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 0, output + errors
    return output.splitlines()


@pytest.mark.rabbit
def test_it_hears_the_same_of_both(
    fake_broker: FakeBroker, rabbitmq_node: RabbitMQNode, java_client: Path
) -> None:
    if rabbitmq_node.version >= (4,):
        pytest.skip("its deaths and delivery counts are those of RabbitMQ 3")
    with (
        started(java_client, fake_broker.url) as on_the_fake,
        started(java_client, rabbitmq_node.url) as on_rabbitmq,
    ):
        lines = heard(on_the_fake)
        assert lines == heard(on_rabbitmq)
    assert {"count: 3", "reply: answer to request 3", "heard: cancelled me"} <= set(lines)
