"""A million messages in the file: opened at once, with little memory, and read at full speed.

And a million ordering keys, which cost what their rows cost.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from reliablepub.message import Message
from reliablepub.outbox.entry import Changes, Entry
from reliablepub.outbox.sqlite.store import SqliteStore

REOPEN = """
import json, sys, time
from reliablepub import Publisher

def peak_mib():  # not getrusage: that begins with what the parent had when it forked
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

url, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
imported = peak_mib()
begun = time.monotonic()
with Publisher(url, outbox=path, close_timeout_s=0) as publisher:
    publisher.publish(b"first", routing_key="all")
    first_s = time.monotonic() - begun
    after_first = peak_mib()
    marks = []
    while True:
        status = publisher.status
        marks.append((status.counters.confirmed, peak_mib()))
        if not status.counters.open:
            break
        time.sleep(0.05)
    seconds = time.monotonic() - begun
print(json.dumps({
    "imported": imported, "after_first": after_first, "first_s": first_s, "seconds": seconds,
    "cpu_s": time.process_time(),
    "peak": peak_mib(), "half": next(m for c, m in marks if c >= count // 2),
    "confirmed": marks[-1][0],
}))
"""
BROKER = """
import sys
from reliablepub.testing import FakeBroker
with FakeBroker() as broker:
    broker.declare_queue("all", arguments={"x-max-length": 1})
    print(broker.url, flush=True)
    sys.stdin.read()
"""


def fill(path: Path, count: int, *, with_keys: bool = False) -> None:
    """So many messages, each with an ordering key of its own, or none with any."""

    def message(number: int) -> Message:
        key = f"key-{number}" if with_keys else None
        return Message(b"x" * 500, "", "all", message_id=f"m-{number}", ordering_key=key)

    with closing(SqliteStore(path)) as store:
        for first in range(0, count, 5_000):
            numbers = range(first, min(first + 5_000, count))
            store.commit(Changes(new=[Entry(message(number), 1.0) for number in numbers]))


def reopen(path: Path, count: int) -> dict[str, float]:
    with subprocess.Popen(
        [sys.executable, "-c", BROKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as broker:
        assert broker.stdout is not None
        url = broker.stdout.readline().strip()
        command = [sys.executable, "-c", REOPEN, url, str(path), str(count)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        broker.communicate()
    found: dict[str, float] = json.loads(result.stdout)
    print(f"\n{count} messages:", {name: round(value, 2) for name, value in found.items()})
    return found


def check(found: dict[str, float], count: int) -> None:
    assert found["confirmed"] == count + 1
    assert found["peak"] < 150, "MiB, the interpreter and all imports among them"
    assert found["peak"] < found["half"] + 10, "flat: the second half needs no more than the first"


def test_a_backlog_needs_little_memory(tmp_path: Path) -> None:
    fill(tmp_path / "outbox.db", 20_000)
    check(reopen(tmp_path / "outbox.db", 20_000), 20_000)


@pytest.mark.soak
def test_a_backlog_of_a_million(tmp_path: Path) -> None:
    fill(tmp_path / "outbox.db", 1_000_000)
    found = reopen(tmp_path / "outbox.db", 1_000_000)
    check(found, 1_000_000)
    assert found["first_s"] < 5


def test_a_key_for_each_message_needs_little_memory(tmp_path: Path) -> None:
    fill(tmp_path / "outbox.db", 5_000, with_keys=True)
    check(reopen(tmp_path / "outbox.db", 5_000), 5_000)


@pytest.mark.soak
def test_a_million_keys_cost_what_their_rows_cost(tmp_path: Path) -> None:
    count = 1_000_000
    cost: dict[bool, dict[str, float]] = {}
    for with_keys in (False, True):
        path = tmp_path / f"{with_keys}.db"
        begun = time.process_time()
        fill(path, count, with_keys=with_keys)
        filled = {"fill_cpu_s": time.process_time() - begun, "mib": path.stat().st_size / 2**20}
        cost[with_keys] = reopen(path, count) | filled
        check(cost[with_keys], count)
        path.unlink()
    plain, keyed = cost[False], cost[True]
    ratios = {name: round(keyed[name] / plain[name], 2) for name in plain if plain[name]}
    print(f"\na million keys, as a multiple of a million messages without: {ratios}")
    assert keyed["first_s"] < 5
    assert keyed["peak"] < plain["peak"] + 10, "MiB"
    assert keyed["mib"] < plain["mib"] * 1.2, "the key itself, and its place in an index"
