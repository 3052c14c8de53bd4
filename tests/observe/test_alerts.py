"""Every alert fires when it should and is resolved when it should, by hours of made-up samples."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import prometheus
from tests.observe.test_shipped import FOLDER, alerts

OF_RELAY = '{outbox="o", instance="h:1", job="relays", version="1"}'


@dataclass(frozen=True)
class Case:
    """A history, one sample a minute, and when an alert fires in it.

    Attributes:
        alert: name of the alert, without the prefix.
        series: samples by series, in promtool's notation; ``up`` is 1 unless given.
        quiet: minutes at which it does not fire: before, and after it was resolved.
        fires: minutes at which it fires.
        words: what the history is.
    """

    alert: str
    series: dict[str, str]
    quiet: tuple[int, ...]
    fires: tuple[int, ...]
    words: str

    @property
    def name(self) -> str:
        return f"{self.alert}: {self.words}"


def gauge(alert: str, metric: str, values: tuple[float, float], for_min: int, words: str) -> Case:
    """A gauge that is bad from the tenth minute to the thirtieth."""
    bad, good = values
    return Case(
        alert,
        {metric: f"{good}x9 {bad}x19 {good}x30"},
        (5, 10 + for_min - 1, 31, 50) if for_min else (5, 9, 31, 50),
        (10 + for_min, 29),
        words,
    )


CASES = (
    gauge("BacklogIsOld", "oldest_open_age_seconds", (301, 200), 2, "it is old, then delivered"),
    Case(
        "BacklogIsOld",
        {
            "oldest_open_age_seconds": "0 60 120 180 240 300 360 420 480 540 stale",
            "open_messages": "4x9 stale",
            "build_info": "1x9 stale",
        },
        (5, 7),
        (8, 9, 12, 60, 240),
        "its relay was killed, and it stays old",
    ),
    Case(
        "BacklogIsOld",
        {
            "oldest_open_age_seconds": "600x9 stale _x20 0x30",
            "open_messages": "4x9 stale _x20 0x30",
        },
        (1, 32, 50),
        (5, 15, 29),
        "its relay was killed, comes back, and delivers",
    ),
    Case(
        "BacklogIsOld",
        {
            "oldest_open_age_seconds": "600x9 stale",
            "open_messages": "4x9 stale",
            'oldest_open_age_seconds{outbox="o", instance="h:2", job="relays"}': "_x20 0x30",
            'open_messages{outbox="o", instance="h:2", job="relays"}': "_x20 0x30",
        },
        (1, 22, 40),
        (5, 15, 18),
        "its pod was replaced by another one, which delivers",
    ),
    Case(
        "BacklogIsOld",
        {
            "oldest_open_age_seconds": "600x40",
            "open_messages": "4x40",
            'oldest_open_age_seconds{outbox="o", instance="h:2", job="relays"}': "0x40",
            'open_messages{outbox="o", instance="h:2", job="relays"}': "0x40",
        },
        (1,),
        (5, 39),
        "a healthy one of the same name hides nothing",
    ),
    Case(
        "BacklogStandsStill",
        {
            "open_messages": "5x60",
            "waiting_messages": "0x60",
            "ledger_confirmed_messages_total": "0+10x9 90x20 100+10x30",
        },
        (4, 9, 15, 34),
        (26, 30),
        "nothing is confirmed for a while",
    ),
    Case(
        "BacklogStandsStill",
        {
            "open_messages": "400x9 stale",
            "waiting_messages": "0x9 stale",
            "ledger_confirmed_messages_total": "7x9 stale",
        },
        (3,),
        (6, 9, 12, 60, 240),
        "its relay was killed with 400 messages",
    ),
    Case(
        "BacklogStandsStill",
        {
            "open_messages": "5x40",
            "waiting_messages": "5x40",
            "ledger_confirmed_messages_total": "7x40",
        },
        (10, 39),
        (),
        "all wait until they are due",
    ),
    Case(
        "BacklogStandsStill",
        {
            "open_messages": "5x40",
            "waiting_messages": "0x40",
            "ledger_confirmed_messages_total": "7x40",
            'ledger_confirmed_messages_total{outbox="o", instance="h:2", job="relays"}': "0+9x40",
        },
        (3,),
        (8, 39),
        "a healthy one of the same name hides nothing",
    ),
    gauge("MessagesAreParked", "parked_messages", (3, 0), 1, "until they are retried"),
    gauge("MessagesExpired", "expired_messages", (3, 0), 1, "until they are discarded"),
    Case(
        "RejectsMessages",
        {'rejected_messages_total{outbox="o", instance="h:1", reason="disk_full"}': "0x9 25x30"},
        (5, 9, 16, 30),
        (10, 13),
        "25 of them, once",
    ),
    Case(
        "OutboxFillsUp",
        {"open_messages": "10x9 85x19 10x20", "open_messages_limit": "100x60"},
        (5, 11, 31, 40),
        (12, 29),
        "85 of 100 messages",
    ),
    Case(
        "OutboxFillsUp",
        {"open_bytes": "10x9 85x19 10x20", "open_bytes_limit": "100x60"},
        (5, 11, 31, 40),
        (12, 29),
        "85 of 100 bytes",
    ),
    Case(
        "OutboxFillsUp",
        {"open_messages": "1e6x40", "open_messages_limit": "8e30x40"},
        (10, 30),
        (),
        "there is no limit",
    ),
    Case(
        "HasNoRelay",
        {"open_messages": "0x9 5x40", "outbox_relayed": "1x4 0x24 1x20"},
        (3, 6, 11, 30, 40),
        (12, 28),
        "enqueued, and no process relays until one starts",
    ),
    Case(
        "IsDown",
        {"build_info": "1x9 stale _x20 1x20", "up": "1x9 0x20 1x20"},
        (5, 11, 32, 45),
        (12, 30),
        "killed, then started again",
    ),
    Case(
        "IsDown",
        {"build_info": "1x9 stale", "up": "1x9 stale"},
        (5, 12, 30),
        (),
        "it was taken out of the targets, which IsNotScraped tells",
    ),
    Case(
        "IsDown",
        {
            "build_info": "1x9 stale",
            "up": "1x9 0x30",
            'build_info{outbox="o", instance="h:2", job="relays", version="1"}': "1x40",
        },
        (5,),
        (12, 38),
        "a healthy one of the same name hides nothing",
    ),
    Case(
        "IsNotScraped",
        {"build_info": "1x9 stale _x20 1x20", "up": "1x9 stale _x20 1x20"},
        (5, 11, 32, 45),
        (12, 30),
        "its pod is deleted, then there again",
    ),
    Case(
        "IsNotScraped",
        {
            "build_info": "1x9 stale",
            "up": "1x9 stale",
            'build_info{outbox="o", instance="h:2", job="relays", version="2"}': "_x10 1x40",
        },
        (5, 12, 40),
        (),
        "its pod was replaced by a newer one",
    ),
    Case(
        "IsNotScraped",
        {"build_info": "1x9 stale", "up": "1x9 0x30"},
        (5, 12, 30),
        (),
        "it does not answer, which IsDown tells",
    ),
    Case(
        "RelayRestarts",
        {"relay_turns_total": "100+100x9 5 9 5 9 5 9 5 9 100+100x40"},
        (5, 12, 40),
        (17, 20),
        "four times in a row",
    ),
    Case(
        "RelayRestarts",
        {"up": "1x9 0 1 0 1 0 1 0 1 0 1x40", "build_info": "1x9 _ 1 _ 1 _ 1 _ 1 _ 1x40"},
        (5, 12, 45),
        (18, 20),
        "it answers now and then",
    ),
    gauge("RelayHangs", "last_turn_age_seconds", (61, 0.05), 1, "until it goes on"),
    gauge("OutboxIsUnreadable", "outbox_readable", (0, 1), 5, "until it is mended"),
    gauge("IsDisconnected", "connected", (0, 1), 3, "until the broker is back"),
    Case(
        "CertificateExpires",
        {"certificate_expiry_timestamp_seconds": "605400x20 9e9x30"},
        (5, 10, 21, 40),
        (11, 20),
        "in a week, until it is renewed",
    ),
    Case(
        "CertificateExpires",
        {"certificate_expiry_timestamp_seconds": "0x40"},
        (5, 39),
        (),
        "there is none",
    ),
    Case(
        "ReconnectStorm",
        {"connections_total": "1x9 2+1x9 11x30"},
        (5, 12, 30),
        (17, 20),
        "a connection a minute",
    ),
    Case(
        "IsBlocked",
        {"blocked_seconds_total": "0x9 60+60x9 600x30"},
        (5, 12, 40),
        (17, 22),
        "for ten minutes",
    ),
    Case(
        "BrokerContradictsItself",
        {"contradictions_total": "0x9 1x90"},
        (5, 9, 75),
        (11, 60),
        "once",
    ),
    gauge("DestinationIsPaused", "paused_destinations", (1, 0), 10, "until the queue has room"),
    Case(
        "MessagesAreAboutToBeGivenUp",
        {"give_up_timestamp_seconds": "0x9 1800x30 0x20"},
        (5, 12, 18, 45),
        (22, 35),
        "ten minutes before, until the destination accepts messages",
    ),
    gauge("MessageIsSetAside", "aside_messages", (1, 0), 10, "until it is parked by hand"),
    Case(
        "DiskIsNearlyFull",
        {"outbox_disk_free_bytes": "20e9x9 4e9x19 20e9x20", "outbox_disk_size_bytes": "100e9x60"},
        (5, 14, 31, 40),
        (15, 29),
        "4 % of a large disk are free",
    ),
    Case(
        "DiskIsNearlyFull",
        {"outbox_disk_free_bytes": "1e9x9 90e6x19 1e9x20", "outbox_disk_size_bytes": "1.5e9x60"},
        (5, 14, 31, 40),
        (15, 29),
        "90 MB of a small disk are free",
    ),
    Case(
        "DiskIsNearlyFull",
        {"outbox_disk_free_bytes": "40e9x40", "outbox_disk_size_bytes": "1000e9x40"},
        (10, 39),
        (),
        "4 % of a very large disk are enough",
    ),
    Case(
        "DiskFillsUp",
        {"outbox_disk_free_bytes": "50e9x9 14e9x19 50e9x20", "outbox_disk_size_bytes": "100e9x60"},
        (5, 24, 31, 40),
        (25, 29),
        "14 % of a large disk are free",
    ),
    gauge("DiskIsFull", "outbox_disk_full", (1, 0), 0, "until space is freed"),
    gauge("LogIsLong", "outbox_log_size_bytes", (65e6, 4e6), 5, "until the reader ends"),
    Case("CallbackFails", {"callback_errors_total": "0x9 1x90"}, (5, 9, 75), (11, 60), "once"),
)


def history(case: Case) -> list[dict[str, str]]:
    """The series in promtool's notation, each with the labels of the relay unless it has some."""
    found = []
    for name, values in {"up": "1x60", **case.series}.items():
        series = name if name == "up" else f"reliablepub_{name}"
        if "{" not in series:
            series += '{instance="h:1", job="relays"}' if name == "up" else OF_RELAY
        found.append({"series": series, "values": values})
    return found


def at(case: Case, minute: int, *, is_firing: bool) -> dict[str, Any]:
    """What promtool is to find for one alert at one minute."""
    state = f'count(ALERTS{{alertname="Reliablepub{case.alert}", alertstate="firing"}}) > 0'
    expression = f"({state}) * 0 + 1"
    return {
        "expr": expression,
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": "{}", "value": 1}] if is_firing else [],
    }


@pytest.fixture(autouse=True)
def there_is_a_prometheus() -> None:
    prometheus.required()


def test_every_alert_has_a_history_in_which_it_fires_and_is_quiet() -> None:
    named = {f"Reliablepub{case.alert}" for case in CASES if case.fires and case.quiet}
    assert named == {alert["alert"] for alert in alerts()}


def test_alerts_fire_and_are_resolved(tmp_path: Path) -> None:
    tests = [
        {
            "name": case.name,
            "interval": "1m",
            "input_series": history(case),
            "promql_expr_test": [
                *(at(case, minute, is_firing=True) for minute in case.fires),
                *(at(case, minute, is_firing=False) for minute in case.quiet),
            ],
        }
        for case in CASES
    ]
    file = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(file))
    command = [str(prometheus.TOOL), "test", "rules", str(tmp_path / "tests.yml")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
