"""A token ends while a task sends: the task fails within seconds, and its retry has the new one."""

from pathlib import Path

import pytest

from reliablepub import Message
from reliablepub.testing import FakeBroker
from spark_sink import BrokerRefused, connection, contact
from spark_sink.options import parse
from spark_sink.task import Sending


def test_a_task_that_outlives_its_token_fails_and_its_retry_reads_the_file_again(
    fake: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact, "_REFUSED_FOR_S", 0.2)
    secret = tmp_path / "token"
    secret.write_text(fake.issue_token(3600))
    url = fake.url.replace("guest:guest@", "guest@")
    settings = parse({"url": url, "passwordFile": str(secret), "report": "/unused"})

    def rows(*numbers: int) -> list[Message]:
        return [Message(b"", routing_key="q", message_id=str(n)) for n in numbers]

    def outlive() -> None:
        with connection.publisher(settings) as lent:
            sending = Sending(lent, settings, partition=7)
            assert not list(sending.send(rows(0), 0))
            fake.wait_for(1, timeout_s=60)
            fake.expire_tokens()
            secret.write_text(fake.issue_token(3600))
            fake.drop_connections()
            list(sending.send(rows(1), 1))
            list(sending.finish())

    with pytest.raises(BrokerRefused):
        outlive()
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=7)
        assert not [*sending.send(rows(0, 1), 0), *sending.finish()]
    assert {m.properties.message_id for m in fake.messages("q")} == {"0", "1"}
