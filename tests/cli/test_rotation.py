"""`reliablepub relay --password-file`: the password changes at the broker, and the file follows."""

import json
from pathlib import Path

from reliablepub import Message
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.cli.conftest import Cli
from tests.waiting import until

USER = "orders"


def set_password(fake: FakeBroker, password: str) -> str:
    """What the user logs in with from now on; the connections end. Return its bare URL."""
    fake.set_password(USER, password)
    fake.drop_connections()
    return fake.url_of(USER).replace(f":{password}@", "@")


def replace(path: Path, password: str) -> None:
    """As Kubernetes rotates a mounted secret: the path has the old file or the new one."""
    new = path.with_name("new")
    new.touch(0o600)
    new.write_text(f"{password}\n")
    new.rename(path)


def test_a_relay_comes_back_with_the_rotated_password(cli: Cli, fake: FakeBroker) -> None:
    url = set_password(fake, "hush-1")
    secret, outbox = cli.folder / "password", cli.folder / "o.db"
    replace(secret, "hush-1")

    def enqueue(numbers: range) -> None:
        fill(outbox, *(Message(b"%d" % number, routing_key="all") for number in numbers))

    enqueue(range(50))
    relay = cli.begin(
        "relay", "--outbox", outbox, "--url", url, "--password-file", secret, "--json"
    )
    until(lambda: len(fake.messages("all")) == 50)
    set_password(fake, "hush-2")
    enqueue(range(50, 100))
    until(lambda: is_refused(cli, outbox))
    replace(secret, "hush-2")  # and no signal
    until(lambda: len(fake.messages("all")) >= 100)
    ended = cli.stop(relay)
    assert ended.code == 0
    counted = [ended.json[name] for name in ("confirmed", "parked", "open")]
    assert counted == [100, 0, 0]
    assert {message.body for message in fake.messages("all")} == {b"%d" % n for n in range(100)}
    assert "refused the credentials" in ended.err


def is_refused(cli: Cli, outbox: Path) -> bool:
    """Whether `outbox status` says that the broker does not let the relay in."""
    status = json.loads(cli("outbox", "status", "--outbox", outbox, "--json").out)
    return "refused the credentials" in json.dumps(status)
