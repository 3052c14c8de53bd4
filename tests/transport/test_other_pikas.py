"""A pika in which a name is another one: messages are confirmed by its public way, and it is said.

Each name that the hooks reach for is renamed in a copy of pika, one by one.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pika
import pytest

from reliablepub import Link, Message, Publisher
from reliablepub.testing import FakeBroker
from reliablepub.transport.pika_hooks import hooks
from tests.asking import fill
from tests.waiting import until

NAMES = [
    *("_on_data_available", "_output_marshaled_frames", "_proto_connection_made", "_transport"),
    *("bytes_sent", "bytes_received", "frames_sent", "frames_received", "callbacks"),
    *("_AsyncPlaintextTransport", "_state", "_STATE_ACTIVE", "_sock", "_consume", "RxEndOfFile"),
    *("get_write_buffer_size", "get_protocol", "decode_frame", "_StreamingProtocolShim"),
]
NOT_HOOKED = {"callbacks"}
"""What the public way uses too, where it is."""

PUBLISHES = """
    import json, sys, warnings
    import reliablepub
    from reliablepub.transport.address import parse_addresses
    from reliablepub.transport.pika import PikaTransport

    url, outbox = sys.argv[1:]
    with reliablepub.Publisher(url, outbox=outbox) as publisher:
        messages = [reliablepub.Message(bytes(2_000_000), routing_key="q") for _ in range(3)]
        publisher.publish_many(messages).wait(30)
        try:
            publisher.publish(b"", routing_key="nowhere", expires_in_s=0.01).result(30)
        except reliablepub.PublishError as error:
            print(type(error).__name__)
        status = publisher.flush(30)
    transport = PikaTransport(parse_addresses(url), run=1, heartbeat_s=10)
    transport.connect()
    while not (events := transport.listen(1)):
        pass
    transport.disconnect("enough")
    for _ in range(3):
        transport.listen(0.01)
    is_left = transport._loop.fd is None
    transport.close()
    print(json.dumps([status.counters.confirmed, status.hooks_off, is_left]))
"""


def patched(folder: Path, name: str, *, version: str = pika.__version__) -> Path:
    """A directory with a pika in which the name is another one."""
    for source in Path(pika.__file__).parent.rglob("*.py"):
        copy = folder / "pika" / source.relative_to(Path(pika.__file__).parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(rf"\b{name}\b", f"{name}_renamed", source.read_text())
        copy.write_text(text.replace(f"'{pika.__version__}'", f"'{version}'"))
    return folder


def run(folder: Path, *arguments: str, exits: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == exits, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_name_costs_nothing_but_time(
    fake_broker: FakeBroker, tmp_path: Path, name: str
) -> None:
    fake_broker.declare_queue("q")
    folder = patched(tmp_path / "patched", name)
    script = tmp_path / "publishes.py"
    script.write_text(re.sub("^    ", "", PUBLISHES, flags=re.MULTILINE))
    outcome, last = run(folder, str(script), fake_broker.url, str(tmp_path / "o.db")).splitlines()
    confirmed, hooks_off, is_left = json.loads(last)
    assert (outcome, confirmed, is_left) == ("Expired", 3, True)
    assert len(fake_broker.messages("q")) == 3
    if name in NOT_HOOKED:
        assert hooks_off == ""
    else:
        assert hooks_off.startswith(f"pika {pika.__version__}")


def test_the_doctor_says_so(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    fill(path, Message(b"x", routing_key="q"))
    folder = patched(tmp_path / "patched", "_sock", version="1.4.9")
    rows = json.loads(
        run(folder, "-m", "reliablepub", "doctor", "--outbox", str(path), "--json", exits=4)
    )
    [found] = [row for row in rows if row["check"] == "pika"]
    assert found["level"] == "warning"
    assert found["found"].startswith("the fast path is off here: pika is 1.4.9; tested versions")


def test_the_relay_s_picture_says_so_to_the_doctor_and_in_the_status(
    fake_broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, command = tmp_path / "o.db", ("-m", "reliablepub")
    monkeypatch.setattr(hooks, "_why_off", "a test has done it")
    with Publisher(fake_broker.url, outbox=path) as publisher:
        until(lambda: publisher.status.link is Link.CONNECTED)
        assert publisher.status.hooks_off == "a test has done it"
        rows = json.loads(run(tmp_path, *command, "doctor", "--outbox", str(path), "--json"))
        words = run(tmp_path, *command, "outbox", "status", "--outbox", str(path))
    found = {row["check"]: row["found"] for row in rows}
    assert found["pika"] == "the fast path is off in the relay: a test has done it"
    assert "slower: a test has done it" in words
