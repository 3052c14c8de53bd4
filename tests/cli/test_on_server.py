"""An outbox in PostgreSQL from the command line: created, granted, looked at, and diagnosed."""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from reliablepub import Message, Outbox, Publisher, RetryPolicy
from reliablepub.cli import main
from reliablepub.cli.doctor import server as server_findings
from reliablepub.cli.doctor.server import of_server
from reliablepub.errors import OutboxError
from reliablepub.outbox.admin.inspection import read_relays
from reliablepub.outbox.database import Relaying
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.postgres import database as postgres_database
from reliablepub.outbox.postgres.database import create_outbox
from reliablepub.outbox.postgres.environment import Owner, ServerSurroundings
from reliablepub.outbox.postgres.server import Server
from reliablepub.outbox.postgres.sql import DEFAULT_SCHEMA, roles
from reliablepub.testing import FakeBroker, faults
from tests.asking import fill
from tests.cli.conftest import Run, refused
from tests.postgres import PostgresServer
from tests.waiting import until

SECRET = "canary"
"""A password, which no output may show."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)

    def invoke(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments)
        assert SECRET not in result.output
        assert result.exit_code == code, result.output
        return result

    return invoke


def with_password(url: str, user: str = "postgres") -> str:
    return url.replace("postgres@", f"{user}:{SECRET}@")


def execute(url: str, text: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(text.encode())


@pytest.fixture
def as_role(postgres_server: PostgresServer, postgres_outbox: str) -> Callable[[str], str]:
    """The URL of an outbox for a user who has just one of the roles."""
    execute(postgres_outbox, roles(DEFAULT_SCHEMA))

    def url_of(role: str) -> str:
        user = f"only_{role}"
        if not postgres_server.execute(f"SELECT 1 FROM pg_roles WHERE rolname = '{user}'"):
            postgres_server.execute("CREATE ROLE {} LOGIN", user)
        execute(postgres_outbox, f"GRANT {DEFAULT_SCHEMA}_{role} TO {user}")
        return postgres_outbox.replace("postgres@", f"{user}@")

    return url_of


# --------------------------------------------------------------------- create


def test_an_outbox_is_created_once(run: Run, postgres_url: str) -> None:
    url = with_password(postgres_url) + "&schema=mail"
    create = ("outbox", "create", "--outbox", url)
    assert "is created" in run(*create, "--shards", "2").stderr
    assert "nothing was changed" in run(*create).stderr
    assert "nothing was changed" in run(*create, "--shards", "2").stderr
    assert "created with 2 shards, and not 4" in run(*create, "--shards", "4", code=2).stderr
    assert "created with no --allow-loss" in run(*create, "--allow-loss", code=2).stderr
    assert json.loads(run("outbox", "status", "--json", "--outbox", url).stdout)["stored"] == 0


def test_a_relay_that_is_proposed_needs_the_users_own_url(run: Run, postgres_outbox: str) -> None:
    fill(postgres_outbox, Message(b"", routing_key="q"))
    told = run("outbox", "explain", "1", "--outbox", postgres_outbox).stdout
    assert "start one: `reliablepub relay --outbox ...`\n" in told


def test_its_sql_makes_the_same_outbox(run: Run, postgres_url: str) -> None:
    url = with_password(postgres_url)
    printed = run("outbox", "create", "--sql", "--outbox", url).stdout
    assert not Outbox(url)._database.exists(), "nothing is connected to"
    execute(url, printed)
    assert "nothing was changed" in run("outbox", "create", "--outbox", url).stderr
    assert Outbox(url).enqueue(Message(b"x", message_id="m")) == "m"


def test_a_file_has_no_such_options(run: Run, tmp_path: Any) -> None:
    path = str(tmp_path / "o.db")
    for option in (["--sql"], ["--roles"], ["--shards", "2"], ["--allow-loss"]):
        run("outbox", "create", *option, "--outbox", path, code=2)
    assert "is created" in run("outbox", "create", "--outbox", path).stderr
    assert "nothing was changed" in run("outbox", "create", "--outbox", path).stderr
    assert Outbox(path).status().stored == 0


# --------------------------------------------------- what a relay's role may not do


@pytest.fixture
def managed_url(postgres_server: PostgresServer, postgres_url: str) -> str:
    """A database of a server that refuses functions, for a user who is no superuser."""
    if not postgres_server.execute("SELECT 1 FROM pg_roles WHERE rolname = 'tenant'"):
        postgres_server.execute("CREATE ROLE tenant LOGIN")
    execute(
        postgres_url,
        "REVOKE EXECUTE ON FUNCTION pg_control_system(), pg_postmaster_start_time(),"
        " pg_stat_get_activity(integer) FROM PUBLIC",
    )
    name = postgres_url.rpartition("/")[2].partition("?")[0]
    postgres_server.execute("GRANT CREATE ON DATABASE {} TO tenant", name)
    return postgres_url.replace("postgres@", "tenant@")


def test_create_tells_that_standbys_take_over_later(run: Run, managed_url: str) -> None:
    told = run("outbox", "create", "--outbox", managed_url).stderr
    assert "is created" in told
    assert "warning: role tenant does not see the server's processes" in told
    assert "GRANT EXECUTE ON FUNCTION pg_stat_get_activity(integer) TO tenant" in told


def test_a_managed_server_that_refuses_functions_can_be_looked_at(
    run: Run, managed_url: str
) -> None:
    Outbox(managed_url).create()
    Outbox(managed_url).enqueue(Message(b"", routing_key="q"))
    found = findings(run, managed_url, code=4, user="tenant")
    levels = {row["check"]: row["level"] for row in found.values() if row["level"] != "ok"}
    assert levels == {"relay": "problem", "privileges": "warning"}
    assert found.keys().isdisjoint({"replicas", "vacuum horizon", "connections"})
    assert (
        json.loads(run("outbox", "status", "--json", "--outbox", managed_url).stdout)["open"] == 1
    )
    assert "everything adds up" in run("outbox", "audit", "--outbox", managed_url).stdout


def test_sequences_that_a_relay_may_not_set_are_told(
    run: Run, as_role: Callable[[str], str], postgres_outbox: str
) -> None:
    url = as_role("relay")
    assert findings(run, url, user="only_relay")["privileges"]["level"] == "ok"
    execute(
        postgres_outbox, "REVOKE UPDATE ON SEQUENCE reliablepub.message_ids FROM reliablepub_relay"
    )
    row = findings(run, url, user="only_relay")["privileges"]
    assert row["level"] == "warning"
    grant = "GRANT UPDATE ON SEQUENCE reliablepub.message_ids TO only_relay"
    assert row["remedy"].endswith(grant)
    assert grant in run("outbox", "create", "--outbox", url).stderr
    execute(postgres_outbox, grant)
    assert findings(run, url, user="only_relay")["privileges"]["level"] == "ok"
    assert findings(run, as_role("reader"))["privileges"]["level"] == "ok", "it is no relay's"


# ---------------------------------------------------------------------- roles


def test_roles_can_be_made_again(run: Run, postgres_outbox: str) -> None:
    printed = run("outbox", "create", "--roles", "--outbox", postgres_outbox).stdout
    execute(postgres_outbox, printed)
    execute(postgres_outbox, printed)


def test_an_enqueuer_cannot_end_the_relay(
    as_role: Callable[[str], str], postgres_outbox: str, fake: FakeBroker
) -> None:
    enqueuer = as_role("enqueuer")
    row = "stored_at, size, message_id, exchange, routing_key, body"
    values = "1e9, 10, 'm', '', 'q', 'x'"
    for name, value in (
        ("xid", "'18446744073709551615'"),
        ("run", "1"),
        ("uncertain", "2147483647"),
    ):
        text = f"INSERT INTO reliablepub.messages ({name}, {row}) VALUES ({value}, {values})"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            execute(enqueuer, text)
    for name in ("$key", "delivery_mode"):
        claim = f"""SELECT reliablepub.enqueue('', 'q', 'x', '{{"{name}":2}}')"""
        with pytest.raises(psycopg.errors.RaiseException, match="properties may have: headers, "):
            execute(enqueuer, claim)
    fake.declare_queue("q")
    with Publisher(fake.url, outbox=postgres_outbox) as publisher:
        publisher.publish(b"", routing_key="q").result(20)


ANY_TYPE = (
    "unnest(bigint[]) RETURNS SETOF bigint",
    "unnest(integer[]) RETURNS SETOF integer",
    "unnest(text[]) RETURNS SETOF text",
    "unnest(xid8[]) RETURNS SETOF xid8",
    "unnest(bytea[]) RETURNS SETOF bytea",
    "unnest(double precision[]) RETURNS SETOF double precision",
    "array_agg_step(bigint[], bigint) RETURNS bigint[]",
    "generate_series(integer, smallint) RETURNS SETOF integer",
    "generate_series(smallint, smallint) RETURNS SETOF integer",
    "float_integer(double precision, integer) RETURNS boolean",
    "float_numeric(double precision, numeric) RETURNS boolean",
    "numeric_integer(numeric, integer) RETURNS boolean",
    "integer_numeric(integer, numeric) RETURNS boolean",
    "bigint_numeric(bigint, numeric) RETURNS boolean",
    "numeric_float(numeric, double precision) RETURNS double precision",
    "numeric_bigint(numeric, bigint) RETURNS numeric",
    "text_integer(text, integer) RETURNS text",
    "nextval(text) RETURNS bigint",
    "pg_total_relation_size(oid) RETURNS bigint",
    "format(text, text) RETURNS text",
    "count_step(bigint, text) RETURNS bigint",
    "count_number(bigint, integer) RETURNS bigint",
)
"""They fit arguments better than a built-in function of any type, or of a wider one."""


def shadows() -> Iterator[str]:
    """Functions and operators in `public` that would run as the user of a statement."""
    body = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'shadowed'; END $$"
    for function in ANY_TYPE:
        yield f"CREATE FUNCTION public.{function} {body}"
    yield "CREATE AGGREGATE public.array_agg(bigint) (SFUNC = array_agg_step, STYPE = bigint[])"
    yield "CREATE AGGREGATE public.count(text) (SFUNC = count_step, STYPE = bigint)"
    yield "CREATE AGGREGATE public.count(integer) (SFUNC = count_number, STYPE = bigint)"
    for name, types in (
        ("float_integer", ("double precision", "integer")),
        ("float_numeric", ("double precision", "numeric")),
        ("numeric_integer", ("numeric", "integer")),
        ("integer_numeric", ("integer", "numeric")),
        ("bigint_numeric", ("bigint", "numeric")),
    ):
        for operator in ("<", "<=", ">", ">=", "=", "<>"):
            left, right = types
            yield (
                f"CREATE OPERATOR public.{operator} (LEFTARG = {left}, RIGHTARG = {right}, "
                f"FUNCTION = public.{name})"
            )
    for operator, left, right, name in (
        ("+", "numeric", "bigint", "numeric_bigint"),
        ("-", "numeric", "double precision", "numeric_float"),
        ("||", "text", "integer", "text_integer"),
    ):
        yield (
            f"CREATE OPERATOR public.{operator} (LEFTARG = {left}, RIGHTARG = {right}, "
            f"FUNCTION = public.{name})"
        )


@pytest.mark.parametrize("is_older", [False, True], ids=["", "older than the outbox"])
def test_a_function_in_public_gets_no_one_s_rights(
    as_role: Callable[[str], str],
    postgres_outbox: str,
    fake: FakeBroker,
    run: Run,
    *,
    is_older: bool,
) -> None:
    """An application may create functions there, and must not read messages as the relay."""
    later = datetime(2100, 1, 1, tzinfo=UTC)
    fake.declare_queue("q")
    if is_older:
        execute(postgres_outbox, "DROP SCHEMA reliablepub CASCADE")
    execute(postgres_outbox, ";".join(shadows()))
    if is_older:  # a view calls what its creator has found
        run("outbox", "create", "--outbox", postgres_outbox)
        execute(postgres_outbox, roles(DEFAULT_SCHEMA))
    relay, app = as_role("relay"), as_role("enqueuer")
    enqueue = "SELECT reliablepub.enqueue('', 'q', 'x', not_before => now(), expires_in_s => 1e6)"
    with Publisher(fake.url, outbox=relay, retry=RetryPolicy.prompt()) as publisher:
        publisher.publish(b"own", routing_key="q").result(20)
        with Outbox(app) as outbox:
            outbox.enqueue(Message(b"theirs", routing_key="q", ordering_key="k"), key="key")
            outbox.enqueue(Message(b"later", routing_key="q", not_before=later))
            outbox.enqueue_many(Message(b"lost", routing_key="nowhere") for _ in range(2))
        execute(app, enqueue)
        until(lambda: fake.published_count >= 5 and publisher.status.counters.parked == 2)
        lists = ("list", "list --state waiting", "list --state confirmed", "list --reason x")
        looks = (*lists, "summary", "status", "stats", "keys")
        for command in (*looks, "in-flight"):
            run("outbox", *command.split(), "--outbox", relay)
        for view in ("open", "parked_messages", "held_keys", "history", "in_flight_tags", "audit"):
            execute(relay, f"SELECT * FROM reliablepub.{view}")
        run("outbox", "retry", "--all", "--yes", "--outbox", relay)
        until(lambda: publisher.status.counters.confirmed >= 3)
    run("outbox", "prune", "--confirmed", "0s", "--yes", "--outbox", relay)
    run("outbox", "audit", "--outbox", relay)
    assert [message.body for message in fake.messages("q")].count(b"theirs") == 1


def test_a_reader_who_sees_no_properties_is_told_of_an_unknown_name(
    as_role: Callable[[str], str], postgres_outbox: str, run: Run
) -> None:
    fill(postgres_outbox, Message(b"x", correlation_id="task"))
    assert "task" in run("outbox", "explain", "task", "--outbox", as_role("reader"), code=2).stderr
    run("outbox", "explain", "task", "--outbox", postgres_outbox)


def test_an_enqueuer_stores_and_reads_nothing(as_role: Callable[[str], str]) -> None:
    url = as_role("enqueuer")
    with Outbox(url, open_messages_max=10) as outbox:
        outbox.enqueue(Message(b"x", "e", "k", ordering_key="o"))
        first = outbox.enqueue(Message(b"x", "e", "k"), key="once")
        assert outbox.enqueue(Message(b"x", "e", "k"), key="once") == first
    execute(url, "SELECT reliablepub.enqueue('e', 'k', 'x'::bytea)")
    for text in (
        "SELECT body FROM reliablepub.messages",
        "SELECT message_id FROM reliablepub.messages",
        "UPDATE reliablepub.messages SET due_at = 0",
        "DELETE FROM reliablepub.messages",
        "INSERT INTO reliablepub.turns SELECT * FROM reliablepub.turns",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            execute(url, text)
    with pytest.raises(OutboxError, match="outbox create --roles"):
        Publisher("amqp://guest:guest@127.0.0.1:1/", outbox=url)


def test_a_relay_relays_and_an_operator_steps_in(
    as_role: Callable[[str], str], fake: FakeBroker, run: Run
) -> None:
    url = as_role("relay")
    with Outbox(url) as outbox:
        outbox.enqueue(Message(b"x", "flights", "flight.1"))
        last = outbox.enqueue(Message(b"x", "flights", "flight.1", ordering_key="o"))
    run("outbox", "park", last, "--note", "wait", "--outbox", url)
    run("outbox", "retry", last, "--outbox", url)
    run("relay", "--drain", "--url", fake.url, "--outbox", url)
    assert len(fake.messages("all")) == 2
    run("outbox", "audit", "--outbox", url)
    run("outbox", "prune", "--confirmed", "0s", "--yes", "--outbox", url)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(url, "UPDATE reliablepub.outbox SET allows_loss = true")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(url, "DROP TABLE reliablepub.messages")


def test_a_reader_sees_neither_bodies_nor_properties(
    as_role: Callable[[str], str], run: Run, postgres_outbox: str
) -> None:
    url = as_role("reader")
    with Outbox(postgres_outbox) as outbox:
        message_id = outbox.enqueue(Message(b"secret", "e", "k"))
    assert json.loads(run("outbox", "status", "--json", "--outbox", url).stdout)["open"] == 1
    for command in ("list", "stats", "keys", "in-flight"):
        run("outbox", command, "--outbox", url)
    for view in ("open", "parked", "confirmed", "history", "interventions", "audit"):
        list(Outbox(url).rows(view))
        Outbox(url).span(view)
    for column in ("body", "properties"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            execute(url, f"SELECT {column} FROM reliablepub.messages")
    run("outbox", "retry", message_id, "--outbox", url, code=4)


# --------------------------------------------------------------------- doctor


def findings(
    run: Run, url: str, code: int = 0, user: str = "postgres"
) -> dict[str, dict[str, str]]:
    given = url.replace(f"{user}@", f"{user}:{SECRET}@")
    found = json.loads(run("doctor", "--json", "--outbox", given, code=code).stdout)
    assert all(row["remedy"] for row in found if row["level"] != "ok")
    return {row["check"]: row for row in found if row["about"] == "outbox"}


def test_a_fine_outbox_is_fine(run: Run, postgres_outbox: str, fake: FakeBroker) -> None:
    with Publisher(fake.url, outbox=postgres_outbox):
        found = findings(run, postgres_outbox)
    assert {row["level"] for row in found.values()} == {"ok"}
    assert f"process {os.getpid()} on {socket.gethostname()}" in found["relay"]["found"]
    assert "fsync on, synchronous_commit on" in found["durability"]["found"]


def test_a_missing_relay_is_a_problem_once_messages_wait(
    run: Run, postgres_outbox: str, fake: FakeBroker
) -> None:
    assert findings(run, postgres_outbox)["relay"]["found"] == "none yet; 0 messages open"
    with Publisher(fake.url, outbox=postgres_outbox):
        pass
    fill(postgres_outbox, Message(b"x", "e", "k"))
    row = findings(run, postgres_outbox, code=4)["relay"]
    assert row["level"] == "problem"
    assert re.match(
        rf"none, the last was process {os.getpid()} on .*; 1 message open", row["found"]
    )


def test_what_loses_accepted_messages_is_found(
    run: Run, postgres_server: PostgresServer, postgres_database: str, postgres_outbox: str
) -> None:
    name = postgres_outbox.rpartition("/")[2].partition("?")[0]
    postgres_server.execute("ALTER DATABASE {} SET synchronous_commit = off", name)
    row = findings(run, postgres_outbox)["durability"]
    assert row["level"] == "warning"
    assert "application's transactions" in row["remedy"]


def test_tables_that_a_crash_empties_are_found(
    run: Run, as_role: Callable[[str], str], postgres_outbox: str
) -> None:
    execute(postgres_outbox, "ALTER TABLE reliablepub.parked SET UNLOGGED")
    execute(postgres_outbox, "ALTER TABLE reliablepub.runs SET UNLOGGED")
    row = findings(run, as_role("reader"), code=4)["durability"]
    assert row["level"] == "problem"
    assert row["found"].startswith("unlogged: reliablepub.parked, reliablepub.runs")
    for table in ("parked", "runs"):
        execute(postgres_outbox, f"ALTER TABLE reliablepub.{table} SET LOGGED")
    assert findings(run, postgres_outbox)["durability"]["level"] == "ok"


@contextmanager
def a_replica(server: PostgresServer) -> Iterator[None]:
    """Receive the server's log as an asynchronous replica does."""
    program = next(Path("/usr/lib/postgresql").glob("*/bin/pg_receivewal"))
    with TemporaryDirectory() as folder:
        where = f"-D {folder} -h 127.0.0.1 -p {server.port} -U postgres"
        process = subprocess.Popen([program, *where.split()])
        try:
            until(lambda: bool(server.execute("SELECT 1 FROM pg_stat_replication")))
            yield
        finally:
            process.terminate()
            process.wait(30)


def test_an_asynchronous_replica_is_found_by_a_reader(
    run: Run, postgres_server: PostgresServer, as_role: Callable[[str], str]
) -> None:
    url = as_role("reader")
    with a_replica(postgres_server):
        row = findings(run, url)["replicas"]
    assert row["level"] == "warning"
    assert row["found"] == "1 replica connected, no commit waits for one"


def test_a_transaction_that_holds_the_horizon_is_found(
    run: Run, postgres_outbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_findings, "LONG_S", 0.0)
    with psycopg.connect(postgres_outbox) as connection:
        connection.execute("SELECT pg_current_xact_id()")
        row = findings(run, postgres_outbox)["vacuum horizon"]
    assert row["level"] == "warning"
    assert row["found"].startswith("held by a transaction that began ")
    with psycopg.connect(postgres_outbox) as connection:
        connection.execute("SELECT pg_current_xact_id()")
        connection.execute("PREPARE TRANSACTION 'forgotten'")
    try:
        assert "was prepared" in findings(run, postgres_outbox)["vacuum horizon"]["found"]
    finally:
        execute(postgres_outbox, "ROLLBACK PREPARED 'forgotten'")


# ------------------------------------------------------- after a move or a fail-over


def test_a_sequence_behind_its_rows_is_found_by_a_reader(
    run: Run, as_role: Callable[[str], str], postgres_outbox: str
) -> None:
    fill(postgres_outbox, *[Message(b"", routing_key="q")] * 3)
    execute(postgres_outbox, "SELECT setval('reliablepub.message_ids', 2)")
    row = findings(run, as_role("reader"), code=4)["sequences"]
    assert (row["level"], row["found"]) == ("problem", "behind their rows: reliablepub.message_ids")
    remedy = "SELECT setval('reliablepub.message_ids', 3)"
    assert row["remedy"].endswith(remedy)
    execute(postgres_outbox, remedy)
    assert findings(run, postgres_outbox, code=4)["sequences"]["level"] == "ok"


def test_a_fail_over_that_has_lost_commits_is_told(
    run: Run, as_role: Callable[[str], str], postgres_outbox: str
) -> None:
    def began_anew(hours_ago: int, why: str) -> None:
        execute(
            postgres_outbox,
            "INSERT INTO reliablepub.runs (shard, pid, host, started_at, began_anew) VALUES"
            f" (0, 1, 'h', extract(epoch FROM now()) - 3600 * {hours_ago}, '{why}')",
        )

    began_anew(30, "it has lost commits: turn 3 of this relay is gone")
    began_anew(2, "the server was restarted, or is another server")
    assert findings(run, as_role("reader"))["fail-over"]["level"] == "ok"
    began_anew(1, "it has lost commits: turn 7 of this relay is gone")
    row = findings(run, as_role("reader"))["fail-over"]
    assert row["level"] == "warning"
    assert row["found"].startswith("run 3 started over 1 h 0 min ago: it has lost commits: turn 7")
    audit = ("outbox", "audit", "--outbox", postgres_outbox)
    told = run(*audit).stderr
    assert [line.partition(" started")[0] for line in told.splitlines()] == ["run 3", "run 1"]
    shown = json.loads(run(*audit, "--json").stdout)
    assert shown["is_right"], "it is past"
    assert [one["run"] for one in shown["lost"]] == [3, 1]


LEFT_OUT = """
INSERT INTO reliablepub.messages
    (id, run, stored_at, size, message_id, exchange, routing_key, body, ordering_key, due_at)
VALUES (%(id)s, 0, 1, 200, 'm', '', 'q', '', %(key)s, %(due_at)s)
"""


def leave_out(url: str, id_: int, key: str | None = None, due_at: float | None = None) -> None:
    """Store a message that no relay finds: its id is below those that were read."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(LEFT_OUT, {"id": id_, "key": key, "due_at": due_at})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_database, "DUE_S", 0.3)
    monkeypatch.setattr(postgres_database, "_STATUS_S", 0.1)


def settled(url: str) -> bool:
    """Whether the relay shows that it has been at rest for longer than `DUE_S`."""
    [relay] = read_relays(outbox_at(url))
    shown = relay.status
    at_rest = shown.get("link") == "connected" and not shown["in_flight"] + shown["buffered"]
    return at_rest and time.time() - shown["since"] > 0.5


@pytest.mark.usefixtures("soon")
def test_messages_that_a_relay_at_rest_leaves_out_are_found(
    run: Run, as_role: Callable[[str], str], postgres_outbox: str, fake: FakeBroker
) -> None:
    fake.declare_queue("q")
    reader = as_role("reader")
    with Publisher(fake.url, outbox=postgres_outbox) as publisher:
        for _ in range(9):
            publisher.publish(b"", routing_key="q").result(20)
        until(lambda: settled(postgres_outbox))
        assert findings(run, reader)["passed over"]["level"] == "ok"
        leave_out(postgres_outbox, 2, due_at=4e9)
        leave_out(postgres_outbox, 3, due_at=float("inf"))
        leave_out(postgres_outbox, 4)
        leave_out(postgres_outbox, 5, "k")
        leave_out(postgres_outbox, 6, "k")
        row = findings(run, reader, code=4)["passed over"]
        assert row["level"] == "problem"
        assert row["found"].startswith("2 messages due")
        assert row["found"].endswith("from id 4")
        audit = ("outbox", "audit", "--outbox", postgres_outbox)
        assert json.loads(run(*audit, "--json", code=4).stdout)["passed_over"] == [4, 5]
        assert "2 messages due for more than a minute" in run(*audit, code=4).stderr
    assert findings(run, reader)["passed over"]["level"] == "ok", "no relay runs"


@pytest.mark.usefixtures("soon")
def test_messages_that_a_relay_at_work_leaves_out_are_found(
    run: Run, postgres_outbox: str, fake: FakeBroker
) -> None:
    fake.declare_queue("q")
    with Publisher(fake.url, outbox=postgres_outbox) as publisher:
        for _ in range(3):
            publisher.publish(b"", routing_key="q").result(20)
        until(lambda: settled(postgres_outbox))
        fake.inject(faults.HoldConfirms())
        publisher.publish(b"", routing_key="q")
        until(lambda: not settled(postgres_outbox))
        leave_out(postgres_outbox, 2)
        leave_out(postgres_outbox, 9)  # may be read next
        leave_out(postgres_outbox, 1, due_at=0)  # may have been released now
        found = findings(run, postgres_outbox, code=4)["passed over"]["found"]
        assert found.startswith("1 message due")
        assert found.endswith("from id 2")


SERVER: dict[str, Any] = {
    "version": "15.18",
    "is_replica": False,
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "synchronous_standbys": "",
    "autovacuum": "on",
    "connections_max": 100,
    "allows_loss": False,
    "replicas": 0,
    "replica_wait_s": None,
    "connections": 1,
    "oldest_age": None,
    "oldest_s": None,
    "prepared_s": None,
    "slot_age": None,
    "dead": 0,
    "live": 0,
    "unlogged": None,
    "role": "app",
    "sees_activity": True,
    "sequences_kept": None,
}


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({}, "server", "ok"),
        ({"is_replica": True}, "server", "problem"),
        ({"autovacuum": "off"}, "server", "warning"),
        ({"fsync": "off"}, "durability", "problem"),
        ({"full_page_writes": "off"}, "durability", "problem"),
        ({"synchronous_commit": "off", "allows_loss": True}, "durability", "warning"),
        ({"synchronous_commit": "local"}, "durability", "ok"),
        ({"replicas": 1, "synchronous_standbys": "*"}, "replicas", "ok"),
        ({"replicas": 0, "synchronous_standbys": "gone"}, "replicas", "problem"),
        (
            {"replicas": 1, "synchronous_standbys": "gone", "replica_wait_s": 9.0},
            "replicas",
            "problem",
        ),
        (
            {"replicas": 1, "synchronous_standbys": "*", "synchronous_commit": "local"},
            "replicas",
            "warning",
        ),
        ({"oldest_age": 2_000_000}, "vacuum horizon", "warning"),
        ({"oldest_s": 5.0, "oldest_age": 2}, "vacuum horizon", "ok"),
        ({"slot_age": 2_000_000}, "vacuum horizon", "warning"),
        ({"dead": 300_000, "live": 10}, "dead rows", "warning"),
        ({"dead": 300_000, "live": 5_000_000}, "dead rows", "ok"),
        ({"connections": 95}, "connections", "warning"),
    ],
)
def test_a_server_is_judged(
    postgres_outbox: str, change: dict[str, Any], check: str, level: str
) -> None:
    owner = Owner(shard=0, pid=1, host="h", is_free=False, silent_s=0.1)
    around = ServerSurroundings(SERVER | change, [owner], 0.0, 0.0, [], [], [])
    found = {
        row.check: row
        for row in of_server(Outbox(postgres_outbox).status(), around, 0.0, [Relaying(0, None, {})])
    }
    assert found[check].level == level
    assert (found[check].remedy == "") == (level == "ok")
    assert [row.check for row in found.values() if row.level != "ok"] == [check] * (level != "ok")


@pytest.mark.parametrize("place", ["", "&schema=user"])
def test_functions_of_another_version_are_found(run: Run, postgres_url: str, place: str) -> None:
    url = postgres_url + place
    create_outbox(Server.of(url), shards=3)

    def found() -> tuple[str, str]:
        rows = json.loads(run("doctor", "--outbox", url, "--json").stdout)
        return next((row["level"], row["found"]) for row in rows if row["check"] == "schema")

    assert found() == ("ok", "its functions are those of this version")
    with psycopg.connect(postgres_url) as connection:
        schema = '"user"' if place else "reliablepub"
        statement = f"SELECT pg_get_functiondef('{schema}.store'::regproc)"
        ((text,),) = connection.execute(statement.encode()).fetchall()
        connection.execute(text.replace("IF NOT FOUND", "IF false").encode())
        connection.execute(f"DROP FUNCTION {schema}.release_key CASCADE".encode())
    assert found() == ("warning", "not as this version creates them: release_key, store")


def test_shards_and_clocks_are_judged(postgres_outbox: str) -> None:
    owners = [
        Owner(shard=0, pid=1, host="h", is_free=False, silent_s=0.1),
        Owner(shard=1, pid=2, host="i", is_free=False, silent_s=60.0),
        Owner(shard=2, pid=None, host="", is_free=True, silent_s=9.0),
    ]
    around = ServerSurroundings(SERVER, owners, -60.0, 60.0, [], [], [])
    status = Outbox(postgres_outbox).status()
    found = {
        row.check: row for row in of_server(status, around, 0.0, [Relaying(0, None, {})], "a bug")
    }
    assert found["relay"].found == (
        "shard 0: process 1 on h; shard 1: none, the last was process 2 on i, 1 min 0 s ago; "
        "shard 2: none yet; it has failed: a bug; 0 messages open"
    )
    assert found["relay"].level == "problem"
    assert found["server clock"].found == "60.0 s behind the clock of this host"
    assert (found["server clock"].level, found["clock"].level) == ("warning", "warning")


def test_a_password_is_in_no_error(run: Run) -> None:
    url = f"postgresql://app:{SECRET}@127.0.0.1:1/shop"
    for command in (["outbox", "status"], ["outbox", "create"], ["doctor"], ["outbox", "check"]):
        run(*command, "--outbox", url, code=2 if "check" in command else 4)
    run("outbox", "status", "--outbox", f"postgresql://app:{SECRET}@[x/shop", code=2)
    with pytest.raises(OutboxError) as caught:
        Outbox(url).enqueue(Message(b"x"))
    assert SECRET not in f"{caught.value!r} {caught.value} {Outbox(url)!r}"


# ---------------------------------------------------------------------- shards


def test_a_shard_without_a_relay_is_told_apart(run: Run, postgres_url: str) -> None:
    url = with_password(postgres_url)
    run("outbox", "create", "--outbox", url, "--shards", "2")

    def shown(*args: str, code: int = 0) -> str:
        return run(*args, "--outbox", url, code=code).stdout

    def is_relayed() -> list[str]:
        lines = shown("outbox", "metrics").splitlines()
        return [line.split()[-1] for line in lines if line.startswith("reliablepub_outbox_relayed")]

    with FakeBroker() as broker, Publisher(broker.url, outbox=url) as publisher:
        broker.declare_queue("orders")
        publisher.publish(b"", routing_key="orders").result(10)
        later = datetime.now(UTC) + timedelta(hours=1)
        for n in range(20):
            Outbox(url).enqueue(
                Message(b"", routing_key="orders", not_before=later, ordering_key=str(n))
            )
        with psycopg.connect(url) as connection:
            found = connection.execute("SELECT shard, min(id) FROM reliablepub.messages GROUP BY 1")
            of_shard: dict[int, int] = dict(found.fetchall())
        until(lambda: '"link": "connected"' in shown("outbox", "status", "--json"))
        relays = json.loads(shown("outbox", "status", "--json", "--over", "0"))["relays"]
        server = broker.url.rpartition("@")[2].partition("/")[0]
        assert [(row["shard"], row["pid"], row["link"], row["server"]) for row in relays] == [
            (0, os.getpid(), "connected", server),
            (1, None, None, None),
        ]
        words = shown("outbox", "status", "--over", "0")
        assert f"shard 0: process {os.getpid()} on {socket.gethostname()}; shard 1: none" in words
        assert "shard 1: unknown: no relay runs" in words
        assert f"the relay (process {os.getpid()}) sends it" in shown(
            "outbox", "explain", str(of_shard[0])
        )
        told = shown("outbox", "explain", str(of_shard[1]))
        assert "no relay runs for shard 1, which has it; start one: `reliablepub relay" in told
        assert "the relay of shard 0 has been connected" in shown("doctor", code=4)
        assert is_relayed() == ["0.0"]
        with Publisher(broker.url, outbox=url):
            until(lambda: shown("outbox", "status", "--over", "0").count("connected for") == 2)
            assert "no relay" not in shown("outbox", "explain", str(of_shard[1]))
            assert is_relayed() == ["1.0"]


def test_the_status_of_an_earlier_run_with_the_same_process_id_does_not_count(
    postgres_outbox: str,
) -> None:
    def link() -> object:
        (relay,) = read_relays(outbox_at(postgres_outbox))
        assert relay.pid == os.getpid()
        return relay.status.get("link")

    with FakeBroker() as broker, Publisher(broker.url, outbox=postgres_outbox):
        until(lambda: link() == "connected")
        with psycopg.connect(postgres_outbox) as connection:  # as if it were of another container
            connection.execute("UPDATE reliablepub.status SET run = run - 1")
        assert link() is None


def test_an_import_names_the_line_with_a_text_that_a_server_cannot_store(
    postgres_outbox: str, tmp_path: Path
) -> None:
    file, url = tmp_path / "o.db", postgres_outbox
    fill(file, *(Message(b"", message_id=message_id) for message_id in ("a", "b\0", "c")))
    lines = CliRunner().invoke(main, ["outbox", "export", "--outbox", str(file)]).stdout
    before = Outbox(url).status().open
    refused(
        CliRunner().invoke(main, ["outbox", "import", "-", "--outbox", url], input=lines),
        "line 2: message_id: has the character U+0000",
    )
    assert Outbox(url).status().open == before + 1


def test_publish_checks_what_the_server_cannot_store(
    run: Run, postgres_outbox: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.ndjson"
    path.write_text('{"id": "a"}\n{"id": "b\\u0000"}\n')
    with FakeBroker() as broker:
        broker.declare_queue("q")
        options = ("--message-id", "{id}", "--routing-key", "q", "--outbox", postgres_outbox)
        told = run("publish", str(path), *options, "--url", broker.url, code=2)
    assert "line 2: message_id: has the character U+0000" in told.stderr
    assert told.stderr.endswith("; nothing was stored\n")
    assert Outbox(postgres_outbox).status().stored == 0
