"""Faults of a publish that take time, or take something away under it; mixes; and all as TOML."""

import dataclasses
from pathlib import Path

import pytest
from pamqp import commands

from reliablepub.testing import faults
from reliablepub.testing.faults import Fault
from reliablepub.testing.history import Fate
from reliablepub.testing.node import Node
from tests.broker.sans_io import TRANSIENT, Client, encode_publish, fates

RETURN = ["Basic.Return", "ContentHeader", "ContentBody"]


# -------------------------------------------------------------------------------- verdicts


def test_drop_return(node: Node, client: Client) -> None:
    node.script.inject(faults.DropReturn())
    assert client.publish("nowhere").names() == ["Basic.Ack"]
    assert fates(node) == [Fate.RETURNED]


def test_delay_return_until_after_the_ack(node: Node, client: Client) -> None:
    node.script.inject(faults.DelayReturn(for_s=0.5))
    assert client.publish("nowhere").names() == ["Basic.Ack"]
    assert client.wait(0.4).names() == ["Basic.Ack"]
    assert client.wait(0.1).names() == ["Basic.Ack", *RETURN]


def test_a_return_that_is_late_with_its_ack(node: Node, client: Client) -> None:
    node.script.inject(faults.DelayReturn(for_s=0.5), faults.DelayConfirm(for_s=0.6))
    assert client.publish("nowhere").names() == []
    assert client.wait(0.5).names() == RETURN
    assert client.wait(0.1).names() == [*RETURN, "Basic.Ack"]


def test_a_delayed_return_finds_its_channel_closed(node: Node, client: Client) -> None:
    node.script.inject(faults.DelayReturn(for_s=0.5))
    client.publish("nowhere")
    client.send(commands.Channel.Close(200, "", 0, 0))
    client.frames.clear()
    assert client.wait(1.0).names() == []


def test_delay_confirm_holds_no_other_back(node: Node, client: Client) -> None:
    node.script.inject(faults.DelayConfirm(nth=2, for_s=1.0))
    client.write(encode_publish("q") * 3)
    assert client.wait(0.01).confirms() == ["ack 1 multiple", "ack 3"]
    assert client.wait(0.9).confirms() == []
    assert client.wait(0.1).confirms() == ["ack 2"]


# -------------------------------------------------------------------------------- taken away


@pytest.mark.parametrize("name", [None, "q"])
def test_a_queue_deleted_under_way_acks(node: Node, client: Client, name: str | None) -> None:
    node.script.inject(faults.DeleteQueue(nth=2, queue=name))
    client.write(encode_publish("q") * 3)
    client.wait(0.01)
    # As RabbitMQ: what was outstanding is acked, what comes behind is unroutable.
    assert sorted(client.confirms()) == ["ack 2 multiple", "ack 3"]
    assert client.names() == RETURN
    assert "q" not in node.vhost.queues
    assert fates(node) == [Fate.ACCEPTED, Fate.ACCEPTED, Fate.RETURNED]


def test_a_queue_deleted_under_way_tells_its_consumers(node: Node, client: Client) -> None:
    node.script.inject(faults.DeleteQueue())
    client.send(commands.Basic.Consume(queue="q", consumer_tag="c"))
    assert client.publish().only(commands.Basic.Cancel).consumer_tag == "c"


def test_an_exchange_deleted_under_way_is_404_for_what_follows(node: Node, client: Client) -> None:
    client.send(commands.Exchange.Declare(exchange="x", exchange_type="fanout"))
    client.send(commands.Queue.Bind(queue="q", exchange="x"))
    client.frames.clear()
    node.script.inject(faults.DeleteExchange(nth=2))
    client.write(encode_publish("", exchange="x", properties=TRANSIENT) * 3)
    close = client.only(commands.Channel.Close)
    assert (close.reply_code, close.reply_text) == (404, "NOT_FOUND - no exchange 'x' in vhost '/'")
    assert fates(node) == [Fate.ACCEPTED, Fate.REFUSED]


def test_an_exchange_that_is_not_there_cannot_be_deleted(node: Node, client: Client) -> None:
    node.script.inject(faults.DeleteExchange())
    assert client.publish(exchange="nope").only(commands.Channel.Close).reply_code == 404


def test_a_flapping_alarm(node: Node, client: Client) -> None:
    node.script.inject(faults.Block(for_s=0.1, keep=True))
    client.write(encode_publish("q", properties=TRANSIENT) * 3)
    for _ in range(3):
        assert client.names() == ["Connection.Blocked"]
        client.frames.clear()
        assert client.wait(0.1).names()[:1] == ["Connection.Unblocked"]
        del client.frames[0]
        assert len(client.confirms()) == 1
    assert client.names() == []


def test_a_new_alarm_outlives_the_end_of_the_old_one(node: Node) -> None:
    node.block("first", for_s=1.0)
    node.block("second", for_s=3.0)
    node.now = 1.5
    node.handle_timeout()
    assert node.alarm == "second"
    node.now = 3.5
    node.handle_timeout()
    assert node.alarm is None


# -------------------------------------------------------------------------------- mixes


def mixed(seed: int) -> list[str]:
    script = faults.FaultScript(seed)
    kinds = (faults.Nack(), faults.Return(), faults.DropConnection(accepted=True))
    script.inject(faults.AnyOf(faults=kinds, share=0.5))
    return [" ".join(one.kind for one in script.on_publish("k")) for _ in range(200)]


def test_a_random_mix_repeats_itself() -> None:
    assert mixed(1) == mixed(1)
    assert mixed(1) != mixed(2)
    assert set(mixed(1)) == {"", "nack", "return", "drop_connection"}


def test_a_mix_acts_as_what_was_drawn(node: Node, client: Client) -> None:
    node.script.inject(faults.AnyOf(faults=(faults.Nack(),)))
    assert client.publish().confirms() == ["nack 1 multiple"]


@pytest.mark.parametrize("inside", [(), (faults.AnyOf(faults=(faults.Nack(),)),)])
def test_a_mix_needs_something_to_draw(inside: tuple[faults.PublishFault, ...]) -> None:
    with pytest.raises(ValueError, match="faults of publishes"):
        faults.AnyOf(faults=inside)


# -------------------------------------------------------------------------------- as TOML

EXAMPLES = {
    "int": "3",
    "float": "2.5",
    "bool": "true",
    "str": '"open"',
    "tuple": '[{ kind = "nack" }, { kind = "crash", accepted = true }]',
}
EXCLUDES = {"stray_ack": {"beyond"}, "cut_stream": {"received"}}
SPECIAL = {"code": "404", "share": "0.5", "accepted": "true"}


@pytest.mark.parametrize("kind", sorted(faults.KINDS))
def test_every_fault_can_be_written_as_toml(tmp_path: Path, kind: str) -> None:
    fields = dataclasses.fields(faults.KINDS[kind])
    lines = [f'[[fault]]\nkind = "{kind}"']
    for field in fields:
        if field.name in EXCLUDES.get(kind, ()):
            continue
        annotation = str(field.type).split("[")[0].split(" ")[0]
        lines.append(f"{field.name} = {SPECIAL.get(field.name) or EXAMPLES[annotation]}")
    path = tmp_path / "faults.toml"
    path.write_text("\n".join(lines))
    (fault,) = faults.load_faults(path)
    assert fault.kind == kind
    assert fault.nth == 3
    assert fault.share == 0.5
    skipped = EXCLUDES.get(kind, set())
    assert all(getattr(fault, field.name) for field in fields if field.name not in skipped)


def test_faults_inside_a_mix(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(
        '[[fault]]\nkind = "any_of"\nshare = 0.1\n'
        'faults = [{ kind = "nack" }, { kind = "delay_confirm", for_s = 2 }]\n'
    )
    inside: tuple[Fault, ...] = (faults.Nack(), faults.DelayConfirm(for_s=2))
    assert faults.load_faults(path) == (faults.AnyOf(share=0.1, faults=inside),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("faults = [3]", r"fault 1 \(any_of\): faults 1: expected a table, not 3"),
        ('faults = [{ kind = "nakc" }]', r"faults 1: kind 'nakc' is not one of"),
        ('faults = [{ kind = "latency", delay_s = 1 }]', "faults of publishes"),
        ("faults = 3", "faults must be"),
        ("", "missing 1 required keyword-only argument: 'faults'"),
    ],
)
def test_a_bad_mix_names_the_place(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(f'[[fault]]\nkind = "any_of"\n{line}\n')
    with pytest.raises(faults.FaultFileError, match=message):
        faults.load_faults(path)


@pytest.mark.parametrize(
    "build",
    [
        lambda: faults.DelayConfirm(for_s=0),
        lambda: faults.DelayReturn(for_s=-1),
        lambda: faults.Latency(delay_s=0),
        lambda: faults.SliceOutput(size=0),
        lambda: faults.Bandwidth(sent_per_s=0),
        faults.Bandwidth,
    ],
)
def test_delays_last_and_pieces_have_a_size(build: type[Fault]) -> None:
    with pytest.raises(ValueError, match=r"more than 0|sent_per_s"):
        build()
