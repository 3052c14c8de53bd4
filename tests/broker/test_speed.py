"""How fast the fake broker is: printed, and never a reason to fail."""

import socket
import subprocess
import sys
import time
from statistics import median
from urllib.parse import urlsplit

import pytest
from pamqp import commands, frame

from reliablepub.testing import FakeBroker
from tests.broker.raw_tcp import OPENED, OPENING, connected
from tests.broker.sans_io import encode_publish

pytestmark = pytest.mark.bench

MESSAGES = 50_000
BATCH = 250
WINDOW = 2_000
CONFIRM_SIZE = 21
QUEUE_DECLARE = frame.marshal(commands.Queue.Declare(queue="q", durable=True), 1)


def test_confirmed_messages_a_second() -> None:
    command = [sys.executable, "-m", "reliablepub", "broker", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = urlsplit(process.stdout.readline().split()[-1]).port
            assert port is not None
            rate = measured(port)
        finally:
            process.terminate()
    print(f"\nfake broker: {rate:,.0f} confirmed messages/s, persistent, 1 KiB each")


def measured(port: int) -> float:
    """Messages a second of a client that has encoded them before."""
    batch = encode_publish("q", bytes(1024)) * BATCH
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(OPENING)
        heard = b""
        while not heard.endswith(OPENED):
            heard += client.recv(65536)
        client.sendall(QUEUE_DECLARE)
        client.recv(65536)
        began = time.perf_counter()
        sent = confirmed = 0
        heard = b""
        while confirmed < MESSAGES:
            while sent < MESSAGES and sent - confirmed < WINDOW:
                client.sendall(batch)
                sent += BATCH
            heard += client.recv(1 << 16)
            whole = len(heard) // CONFIRM_SIZE * CONFIRM_SIZE
            # The publishes are alike, so nothing overtakes: the last confirm covers all before.
            if whole:
                last = heard[whole - CONFIRM_SIZE : whole]
                assert last[7:11] == b"\x00\x3c\x00\x50"  # basic.ack
                confirmed = int.from_bytes(last[11:19], "big")
            heard = heard[whole:]
        return MESSAGES / (time.perf_counter() - began)


def test_the_start_of_a_broker() -> None:
    took_ms = []
    for _ in range(20):
        began = time.perf_counter()
        with FakeBroker() as broker, connected(broker) as client:
            client.sendall(OPENING)
            client.recv(1)
            took_ms.append((time.perf_counter() - began) * 1000)
    print(f"\nfake broker: {median(took_ms):.1f} ms until a client hears from it")
