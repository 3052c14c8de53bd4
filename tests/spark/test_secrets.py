"""Nothing that Spark shows or keeps holds our password: plans, pages, event log, errors, logs."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from reliablepub.testing import FakeBroker, NodeOptions
from tests.spark.session import CANARY, PASSWORD_VARIABLE

pytestmark = pytest.mark.timeout(300)

WRONG = ({"routing_key": "nobody"}, {"rooting": "x"}, {"url": f"http://user:{CANARY}@host/"})


@pytest.fixture
def guarded() -> Iterator[FakeBroker]:
    with FakeBroker(options=NodeOptions(users={"user": CANARY})) as broker:
        broker.declare_queue("q")
        yield broker


def shown(spark: SparkSession) -> str:
    """The event log so far, and what the page of queries is made of."""
    context = spark.sparkContext
    folder = Path(unquote(urlsplit(str(spark.conf.get("spark.eventLog.dir"))).path))
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert context.uiWebUrl is not None
    port = urlsplit(context.uiWebUrl).port
    api = f"http://127.0.0.1:{port}/api/v1/applications/{context.applicationId}"
    for page in ("sql?details=true&length=1000", "environment"):
        with urllib.request.urlopen(f"{api}/{page}", timeout=30) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)


def test_the_canary_is_nowhere(
    spark: SparkSession, guarded: FakeBroker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = guarded.url_of("user")
    assert CANARY in url
    password = tmp_path / "password"
    password.write_text(CANARY)
    bare = url.replace(f":{CANARY}@", "@")
    assert CANARY not in bare
    df = spark.range(0, 10, 1, 1).selectExpr("string(id) value")
    errors: list[str] = []
    spark.sparkContext.setLogLevel("INFO")
    try:
        for options in (
            {"url": url},
            {"url": bare, "passwordFile": str(password)},
            {"url": bare, "passwordEnv": PASSWORD_VARIABLE},
        ):
            common = {**options, "returnedAttempts": "1"}
            writer = df.write.format("rabbitmq").options(**common).mode("append")
            writer.option("routing_key", "q").save()
            for wrong in WRONG if not errors else ():
                with pytest.raises(PySparkException) as caught:
                    writer.options(**wrong).save()
                errors.append(str(caught.value))
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in" / "a.txt").write_text("a")
            query = (
                spark.readStream.format("text")
                .load(str(tmp_path / "in"))
                .writeStream.format("rabbitmq")
                .options(checkpointLocation=str(tmp_path / f"checkpoint{len(errors)}"), **common)
                .option("routing_key", "q")
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            query.explain(extended=True)
            errors.append(str(query.lastProgress))
    finally:
        spark.sparkContext.setLogLevel("OFF")
    assert len(guarded.messages("q")) == 33
    texts = {
        "errors": "\n".join(errors),
        "event log and pages": shown(spark),
        "output and driver log": "".join(capfd.readouterr()),
        "checkpoint": "".join(
            path.read_text(errors="replace")
            for path in tmp_path.rglob("checkpoint*/**/*")
            if path.is_file()
        ),
    }
    assert {name for name, text in texts.items() if CANARY in text} == set()
    assert all(texts.values())
