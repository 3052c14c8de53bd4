"""One test per fault rule, in virtual time; and the script that decides when a rule acts."""

from pathlib import Path
from typing import Any

import pytest
from pamqp import commands

from reliablepub.testing import FakeBroker, faults
from reliablepub.testing.connection import Ending
from reliablepub.testing.faults import Fault, FaultFileError, FaultScript, PublishFault, load_faults
from reliablepub.testing.history import Fate
from reliablepub.testing.node import Node
from tests.broker.sans_io import TRANSIENT, Client, encode_publish, fates


def publish_some(client: Client, count: int) -> None:
    """In one write, so that the verdicts come together."""
    client.write(b"".join(encode_publish("q", b"%d" % i) for i in range(1, count + 1)))
    client.wait(0.01)


# -------------------------------------------------------------------------------- when


def fired(script: FaultScript, count: int, key: str = "k") -> list[int]:
    return [i for i in range(1, count + 1) if script.on_publish(key)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (faults.Nack(), [1]),
        (faults.Nack(nth=3), [3]),
        (faults.Nack(times=2), [1, 2]),
        (faults.Nack(nth=3, times=2), [3, 4]),
        (faults.Nack(keep=True), [1, 2, 3, 4, 5]),
        (faults.Nack(nth=4, keep=True), [4, 5]),
        (faults.Nack(share=1), [1, 2, 3, 4, 5]),
        (faults.Nack(share=0), []),
        (faults.Nack(share=1, times=2), [1, 2]),
        (faults.Nack(routing_key="k"), [1]),
        (faults.Nack(routing_key="other", keep=True), []),
        (faults.HoldConfirms(nth=2), [2, 3, 4, 5]),
        (faults.HoldConfirms(times=2), [1, 2]),
        (faults.RefuseHandshake(keep=True), []),
    ],
)
def test_when_a_rule_acts(fault: Fault, expected: list[int]) -> None:
    script = FaultScript()
    script.inject(fault)
    assert fired(script, 5) == expected


def test_nth_counts_only_what_the_rule_sees() -> None:
    script = FaultScript()
    script.inject(faults.Nack(routing_key="b", nth=2))
    assert [bool(script.on_publish(key)) for key in "abab"] == [False, False, False, True]


def test_a_share_is_repeatable_and_about_right() -> None:
    def draw(seed: int) -> list[int]:
        script = FaultScript(seed)
        script.inject(faults.Nack(share=0.2))
        return fired(script, 1000)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert 150 < len(draw(1)) < 250


def test_rules_compose_in_the_order_they_were_injected() -> None:
    script = FaultScript()
    nack, duplicate = faults.Nack(), faults.DuplicateConfirm()
    script.inject(duplicate, nack)
    assert script.on_publish("k") == (duplicate, nack)
    assert script.on_publish("k") == ()


@pytest.mark.parametrize(
    "values", [{"nth": 0}, {"times": 0}, {"share": 1.1}, {"share": -0.1}, {"code": 9}]
)
def test_a_rule_that_makes_no_sense_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"nth|times|share|code"):
        faults.CloseChannel(**values)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------- what


def test_nack(node: Node, client: Client) -> None:
    node.script.inject(faults.Nack(nth=2))
    publish_some(client, 3)
    # The nack is known at once, the acks only when the batch is written.
    assert client.confirms() == ["nack 2", "ack 3 multiple"]
    assert fates(node) == [Fate.ACCEPTED, Fate.NACKED, Fate.ACCEPTED]
    assert len(node.vhost.queues["q"].ready) == 2


def test_return_although_routable(node: Node, client: Client) -> None:
    node.script.inject(faults.Return())
    assert client.publish().names() == ["Basic.Return", "ContentHeader", "ContentBody", "Basic.Ack"]
    assert fates(node) == [Fate.RETURNED]
    assert not node.vhost.queues["q"].ready


def test_return_of_what_is_not_mandatory_is_only_an_ack(node: Node, client: Client) -> None:
    node.script.inject(faults.Return())
    assert client.publish(mandatory=False).names() == ["Basic.Ack"]
    assert fates(node) == [Fate.UNROUTABLE]


def test_late_return(node: Node, client: Client) -> None:
    node.script.inject(faults.LateReturn())
    client.publish(properties=TRANSIENT)
    assert client.names() == ["Basic.Ack", "Basic.Return", "ContentHeader", "ContentBody"]
    assert len(node.vhost.queues["q"].ready) == 1


def test_hold_confirms_until_released(node: Node, client: Client) -> None:
    node.script.inject(faults.HoldConfirms())
    publish_some(client, 3)
    assert client.confirms() == []
    node.release_confirms()
    client.listen()
    assert client.confirms() == ["ack 3 multiple"]
    publish_some(client, 1)
    assert client.confirms() == ["ack 4"]


def test_released_before_it_is_written_a_confirm_is_not_held(node: Node, client: Client) -> None:
    node.script.inject(faults.HoldConfirms())
    client.publish()
    node.release_confirms()
    assert client.wait(1).confirms() == ["ack 1"]


def test_a_held_confirm_holds_back_multiple_acks(node: Node, client: Client) -> None:
    node.script.inject(faults.HoldConfirms(nth=2, times=1))
    publish_some(client, 4)
    assert client.confirms() == ["ack 1 multiple", "ack 3", "ack 4"]
    node.release_confirms()
    client.listen()
    assert client.confirms() == ["ack 2"]


def test_confirms_released_after_the_channel_is_gone_go_nowhere(node: Node, client: Client) -> None:
    node.script.inject(faults.HoldConfirms())
    client.publish()
    client.send(commands.Channel.Close(200, "", 0, 0))
    client.send(commands.Channel.Open())
    client.send(commands.Confirm.Select())
    node.release_confirms()
    client.listen()
    assert client.confirms() == []


def test_drop_confirm_is_not_covered_by_a_multiple_ack(node: Node, client: Client) -> None:
    node.script.inject(faults.DropConfirm(nth=2))
    publish_some(client, 4)
    assert client.confirms() == ["ack 1 multiple", "ack 3", "ack 4"]
    assert fates(node) == [Fate.ACCEPTED] * 4


def test_duplicate_confirm(node: Node, client: Client) -> None:
    node.script.inject(faults.DuplicateConfirm(nth=2))
    publish_some(client, 3)
    assert client.confirms() == ["ack 3 multiple", "ack 2"]


def test_shuffle_confirms(node: Node, client: Client) -> None:
    node.script.inject(faults.ShuffleConfirms())
    publish_some(client, 12)
    confirms = client.confirms()
    in_order = [f"ack {tag}" for tag in range(1, 13)]
    assert sorted(confirms) == sorted(in_order)
    assert confirms != in_order


@pytest.mark.parametrize(
    ("fault", "stray"),
    [
        (faults.StrayAck(nth=2, beyond=7), "ack 9"),
        (faults.StrayAck(nth=2, beyond=7, multiple=True), "ack 9 multiple"),
        (faults.StrayAck(nth=2, tag=1), "ack 1"),
        (faults.StrayAck(nth=2, tag=0, multiple=True), "ack 0 multiple"),
    ],
)
def test_stray_ack(node: Node, client: Client, fault: Fault, stray: str) -> None:
    node.script.inject(fault)
    publish_some(client, 2)
    assert client.confirms() == ["ack 2 multiple", stray]


@pytest.mark.parametrize("values", [{}, {"tag": 1, "beyond": 1}])
def test_stray_ack_names_one_tag(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="either"):
        faults.StrayAck(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("accepted", "queued"), [(False, 1), (True, 2)])
def test_close_channel_throws_pending_confirms_away(
    node: Node,
    client: Client,
    accepted: bool,  # noqa: FBT001
    queued: int,
) -> None:
    node.script.inject(faults.CloseChannel(nth=2, code=404, text="gone", accepted=accepted))
    publish_some(client, 4)
    close = client.only(commands.Channel.Close)
    assert (close.reply_code, close.reply_text) == (404, "NOT_FOUND - gone")
    assert (close.class_id, close.method_id) == (60, 40)
    assert client.names() == []
    assert len(node.vhost.queues["q"].ready) == queued
    assert len(fates(node)) == 2  # the others were ignored
    assert fates(node)[1] is (Fate.ACCEPTED if accepted else Fate.REFUSED)


@pytest.mark.parametrize("accepted", [False, True])
def test_close_connection(node: Node, client: Client, accepted: bool) -> None:  # noqa: FBT001
    node.script.inject(faults.CloseConnection(code=541, accepted=accepted))
    publish_some(client, 2)
    assert client.only(commands.Connection.Close).reply_code == 541
    assert client.names() == []
    assert len(node.vhost.queues["q"].ready) == accepted
    assert client.send(commands.Connection.CloseOk(), 0).connection.ending is Ending.FLUSH


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize(("reset", "ending"), [(True, Ending.RESET), (False, Ending.FIN)])
def test_drop_connection(
    node: Node,
    client: Client,
    accepted: bool,  # noqa: FBT001
    reset: bool,  # noqa: FBT001
    ending: Ending,
) -> None:
    node.script.inject(faults.DropConnection(nth=2, reset=reset, accepted=accepted))
    publish_some(client, 3)
    assert client.connection.ending is ending
    assert client.names() == []
    assert len(node.vhost.queues["q"].ready) == 1 + accepted
    assert fates(node)[1] is (Fate.ACCEPTED if accepted else Fate.LOST)


@pytest.mark.parametrize("accepted", [False, True])
def test_crash_is_announced_and_loses_what_is_not_written(
    node: Node,
    client: Client,
    accepted: bool,  # noqa: FBT001
) -> None:
    client.publish(content=b"written")
    client.wait(0.01)
    node.script.inject(faults.Crash(nth=3, accepted=accepted))
    client.write(b"".join(encode_publish(content=b"%d" % i) for i in range(1, 5)))
    assert [type(fault) for fault in node.triggered] == [faults.Crash]
    node.restart(keep_unwritten=False)
    bodies = [entry.publish.body for entry in node.vhost.queues["q"].ready]
    assert bodies == ([b"written", b"3"] if accepted else [b"written"])
    kept = Fate.ACCEPTED if accepted else Fate.LOST
    assert fates(node) == [Fate.ACCEPTED, Fate.LOST, Fate.LOST, kept]


def test_block_withholds_the_publish_that_meets_it(node: Node, client: Client) -> None:
    node.script.inject(faults.Block(nth=2, reason="low on disk"))
    publish_some(client, 3)
    assert client.only(commands.Connection.Blocked).reason == "low on disk"
    assert client.confirms() == ["ack 1"]
    assert fates(node) == [Fate.ACCEPTED, Fate.WITHHELD]
    assert not client.connection.is_reading
    node.unblock()
    client.listen()
    client.only(commands.Connection.Unblocked)
    assert client.wait(0.01).confirms() == ["ack 3 multiple"]
    assert fates(node) == [Fate.ACCEPTED] * 3


def test_block_ends_by_itself(node: Node, client: Client) -> None:
    node.script.inject(faults.Block(for_s=30.0))
    assert client.publish(properties=TRANSIENT).wait(29.0).confirms() == []
    assert client.wait(1.1).confirms() == ["ack 1"]


def test_freeze_withholds_and_is_announced(node: Node, client: Client) -> None:
    node.script.inject(faults.Freeze(nth=2, for_s=1.0))
    publish_some(client, 3)
    assert [type(fault) for fault in node.triggered] == [faults.Freeze]
    assert fates(node) == [Fate.ACCEPTED, Fate.WITHHELD]
    node.triggered.clear()
    node.thaw()
    client.wait(0.01)
    assert fates(node) == [Fate.ACCEPTED] * 3


def test_a_frozen_broker_does_not_miss_its_clients_and_may_wake_up_blocked(node: Node) -> None:
    client = Client(node).open(heartbeat=10)
    node.script.inject(faults.Freeze())
    client.publish()
    node.block("low on memory")
    node.now += 100
    node.thaw()
    client.wait(0)
    client.only(commands.Connection.Blocked)
    assert fates(node) == [Fate.WITHHELD]
    node.unblock()
    client.wait(0.01)
    client.only(commands.Connection.Unblocked)
    assert client.confirms() == ["ack 1"]


def test_two_faults_on_one_publish(node: Node, client: Client) -> None:
    node.script.inject(faults.Nack(), faults.DuplicateConfirm())
    assert client.publish().confirms() == ["nack 1 multiple", "nack 1"]


# -------------------------------------------------------------------------------- TOML


def write(path: Path, text: str) -> Path:
    file = path / "faults.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("wrong", [faults.Nack, None, [faults.Nack()]])
def test_what_is_not_a_fault_is_refused(wrong: Any, fake_broker: FakeBroker) -> None:
    """A class, because of forgotten parentheses, would never act, and the test would pass."""
    with pytest.raises(TypeError, match=r"not a fault; write faults.Nack\(\)"):
        fake_broker.inject(faults.Return(), wrong)
    assert fake_broker.faults == ()


def test_the_path_of_a_fault_file_may_be_a_text(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('[[fault]]\nkind = "nack"')
    assert load_faults(str(path)) == (faults.Nack(),)


def test_load_faults(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [[fault]]
        kind = "nack"
        share = 1

        [[fault]]
        kind = "crash"
        nth = 100
        down_for_s = 2
        accepted = true

        [[fault]]
        kind = "close_channel"
        code = 404
        text = "no exchange"
        """,
    )
    assert load_faults(file) == (
        faults.Nack(share=1),
        faults.Crash(nth=100, down_for_s=2, accepted=True),
        faults.CloseChannel(code=404, text="no exchange"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[fault]]\nkind = 'explode'", r"fault 1: kind 'explode' is not one of any_of, .*nack"),
        ("[[fault]]\nnth = 1", r"fault 1: kind None is not one of"),
        ("[[fault]]\nkind = 'nack'\n[[fault]]\nkind = 'nack'\nnht = 1", r"fault 2.*key 'nht'"),
        ("[[fault]]\nkind = 'nack'\nnth = 'two'", r"nth must be int \| None, not 'two'"),
        ("[[fault]]\nkind = 'nack'\nkeep = 1", r"keep must be bool, not 1"),
        ("[[fault]]\nkind = 'nack'\nnth = true", r"nth must be int"),
        ("[[fault]]\nkind = 'nack'\nnth = 0", r"\(nack\): nth counts from 1"),
        ("seed = 3", r"only \[\[fault\]\] tables, found \['seed'\]"),
        ("fault = 3", r"only \[\[fault\]\] tables"),
        ("fault = [3]", r"fault 1: expected a table"),
        ("[[fault", r"faults.toml: Expected"),
    ],
)
def test_a_bad_fault_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FaultFileError, match=message):
        load_faults(write(tmp_path, text))


def test_a_missing_fault_file(tmp_path: Path) -> None:
    with pytest.raises(FaultFileError, match="No such file"):
        load_faults(tmp_path / "none.toml")


def test_every_kind_has_a_name() -> None:
    kinds = [
        one
        for one in vars(faults).values()
        if isinstance(one, type) and issubclass(one, Fault) and "kind" in vars(one)
    ]
    assert {kind.kind: kind for kind in kinds if kind not in (Fault, PublishFault)} == faults.KINDS
