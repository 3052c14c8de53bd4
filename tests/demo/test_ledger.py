"""The ledger must be able to fail: what is missing, given up or strange ends in exit code 1."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from reliablepub import Message, Outbox
from reliablepub.demo import command
from reliablepub.demo.arrivals import Count, ledger_of, problems_of, read_history, write_flights
from reliablepub.demo.command import faults
from reliablepub.testing import load_faults

GOOD = {
    **dict.fromkeys(("records", "stored", "confirmed", "consumed"), 3),
    **dict.fromkeys(("duplicates", "killed", "crashed"), 1),
    **dict.fromkeys(("parked", "open", "lost", "redelivered", "unknown_ids", "damaged"), 0),
    **dict.fromkeys(("nacked", "returned", "uncertain", "connections_lost"), 0),
}


def test_a_record_that_did_not_arrive_is_lost(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db")
    for n in (1, 2, 3):
        outbox.enqueue(Message(b"", message_id=f"m{n}"))
    count = Count()
    for n in (1, 3, 4):  # 4 is no record, and makes up for nothing
        count.add(n, f"m{n}", redelivered=False)
    ledger = ledger_of(3, outbox.status(), count, read_history(outbox.path), killed=1)
    outbox.close()
    assert (ledger["consumed"], ledger["lost"], ledger["open"]) == (2, 1, 3)
    assert problems_of(ledger) == ["1 records are lost", "3 messages are still open"]


def test_duplicates_need_the_id_of_the_first_delivery() -> None:
    count = Count()
    count.add(1, "m1", redelivered=False)
    count.add(1, "m1", redelivered=True)
    count.add(1, "m1", redelivered=False)
    assert (count.duplicates, count.redelivered, count.unknown_ids) == (2, 1, 0)
    count.add(1, "other", redelivered=False)
    count.add(2, None, redelivered=False)
    count.add(2, None, redelivered=False)
    assert (count.duplicates, count.unknown_ids) == (4, 2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"consumed": 2, "lost": 1}, "lost"),
        ({"stored": 4}, "4 messages were stored for 3"),
        ({"parked": 1}, "given up"),
        ({"open": 1}, "still open"),
        ({"unknown_ids": 1}, "duplicates have an id"),
        ({"damaged": 1}, "another body"),
    ],
)
def test_whatever_is_wrong_ends_in_exit_code_1(
    change: dict[str, int], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "tell", lambda *_, **__: GOOD | change)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(command.demo, ["--json"])
    assert result.exit_code == 1
    assert problem in json.loads(result.stdout)["problems"][0]
    assert f"the working directory is {tmp_path}" in result.stderr
    assert len(list(tmp_path.iterdir())) == 1  # kept, to look into


def test_a_good_ledger_ends_in_exit_code_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "tell", lambda *_, **__: GOOD)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(command.demo, [])
    assert result.exit_code == 0
    assert "nothing is lost" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_beyond_the_last_flight_flights_repeat_under_new_numbers(tmp_path: Path) -> None:
    checksums = write_flights(tmp_path / "flights.ndjson", 5_002)
    lines = (tmp_path / "flights.ndjson").read_text().splitlines()
    first, again = json.loads(lines[1]), json.loads(lines[5_001])
    assert (first.pop("n"), again.pop("n")) == (2, 5_002)
    assert first == again
    assert len({json.loads(line)["n"] for line in lines}) == len(checksums) == 5_002


@pytest.mark.parametrize("count", [100, 2_000, 20_000, 1_000_000])
def test_the_fault_script_fits_any_number_of_records(count: int, tmp_path: Path) -> None:
    script = tmp_path / "faults.toml"
    script.write_text(faults(count))
    loaded = load_faults(script)
    assert {fault.kind for fault in loaded} == {
        *("nack", "return", "block", "drop_connection", "crash")
    }
    assert all(0 < (fault.nth or 1) < count for fault in loaded)
