"""What is shipped speaks of metrics and commands that there are, and is what it is taken for."""

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import reliablepub.observe
from reliablepub.cli import main
from reliablepub.cli.shipped import FILES
from reliablepub.observe.catalogue import CATALOGUE, OUTBOX_LABEL
from tests.docs.documents import INLINE, ROOT, anchors
from tests.docs.test_documents import assert_command

FOLDER = Path(reliablepub.observe.__file__).parent / "shipped"
UNIT = FOLDER / "reliablepub-relay@.service"
SERIES = {name: metric for metric in CATALOGUE for name in metric.series}
OF_SCRAPE = {"instance", "job", "le"}


def assert_real(expression: str) -> None:
    """Metrics and labels of an expression are in the catalogue."""
    names = re.findall(r"\breliablepub_\w+", expression)
    assert names
    assert set(names) <= set(SERIES)
    labels = {OUTBOX_LABEL, *OF_SCRAPE, *(SERIES[name].label for name in names)}
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in by.split(",")} <= labels
    for selector in re.findall(r"{([^}]*)}", expression):
        assert set(re.findall(r"(\w+)[=!]", selector)) <= labels


def test_every_file_is_printed_as_it_is() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    for name in FILES:
        result = CliRunner().invoke(main, ["shipped", name])
        assert (result.exit_code, result.stdout) == (0, (FOLDER / name).read_text())


def test_links_to_the_page_on_call_lead_to_the_readers_copy() -> None:
    url = "https://docs.example.com/on-call"
    result = CliRunner().invoke(main, ["shipped", "alerts.yml", "--runbook", url])
    expected = (FOLDER / "alerts.yml").read_text().replace('"on-call.md#', f'"{url}#')
    assert (result.exit_code, result.stdout) == (0, expected)
    assert expected.count(url) == len(alerts())


# ---------------------------------------------------------------------- alerts


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_metrics_and_names_commands_that_there_are(alert: dict[str, Any]) -> None:
    assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, paragraph = alert["annotations"]["runbook_url"].partition("#")
    assert paragraph in anchors(ROOT / "docs" / page)
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert_real(alert["expr"])
    for command in INLINE.findall(alert["annotations"]["description"]):
        assert_command(command.split()[1:])
    for label in re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]):
        kept = " ".join(re.findall(r"by \(([^)]*)\)", alert["expr"]))
        assert label in {OUTBOX_LABEL, *OF_SCRAPE, *re.findall(r"\w+", kept)}


def test_what_means_that_messages_do_not_arrive_is_alerted() -> None:
    asked = {name for alert in alerts() for name in re.findall(r"reliablepub_\w+", alert["expr"])}
    assert asked >= {
        "reliablepub_oldest_open_age_seconds",
        "reliablepub_parked_messages",
        "reliablepub_expired_messages",
        "reliablepub_outbox_relayed",
        "reliablepub_blocked_seconds_total",
        "reliablepub_contradictions_total",
        "reliablepub_connections_total",
    }
    assert len({alert["alert"] for alert in alerts()}) == len(alerts())


# ---------------------------------------------------------------------- dashboard


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    panels: list[dict[str, Any]] = dashboard["panels"]
    return panels


def test_the_dashboard_shows_every_metric_there_is() -> None:
    expressions = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    for expression in expressions:
        assert_real(expression)
    shown = {SERIES[name] for text in expressions for name in re.findall(r"reliablepub_\w+", text)}
    assert {metric.name for metric in CATALOGUE} == {metric.name for metric in shown}


def test_its_legends_are_labels_that_remain() -> None:
    for panel in panels():
        for target in panel.get("targets", []):
            remaining = set(re.findall(r"\w+", re.findall(r"by \(([^)]*)\)", target["expr"])[0]))
            assert {"outbox", "instance"} <= remaining
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= remaining


def test_its_tiles_show_the_last_scrape_and_not_the_last_value_there_was() -> None:
    tiles = [panel for panel in panels() if panel["type"] == "stat"]
    assert tiles
    for tile in tiles:
        for target in tile["targets"]:
            assert (target["instant"], target["range"]) == (True, False)


def test_its_panels_have_a_place_of_their_own() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    places = [panel["gridPos"] for panel in panels()]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


# ---------------------------------------------------------------------- unit


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_unit_runs_a_command_that_there_is() -> None:
    service = settings()["Service"]
    program, *words = service["ExecStart"].split()
    assert program.endswith("/reliablepub")
    assert_command(words)
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert int(service["WatchdogSec"]) > 0
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["Environment"].partition("=")[0] in {name for name in variables() if name}


def variables() -> Iterator[str]:
    relay = main.get_command(main.make_context("reliablepub", ["relay"]), "relay")
    assert relay is not None
    for parameter in relay.params:
        yield str(parameter.envvar)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    program = settings()["Service"]["ExecStart"].split()[0]
    here.write_text(UNIT.read_text().replace(program, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(here)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert str(tmp_path) not in found.stderr
    assert "reliablepub" not in found.stderr
    # Of 10, in tenths: 17 are left, for the network, which a relay needs.
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(here)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
