"""Programs that fork, as applications do: `python -m tests.surroundings.forking SHAPE PATH`.

Each tells every call that has returned, from whatever process: `stored ID`; and every call that has
raised: `raised ID ERROR`. What it told is compared with the outbox afterwards.
"""

import ctypes
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from reliablepub import Message, Outbox, Publisher, ReliablePubError
from tests.sqlite import sql
from tests.surroundings.app import NOWHERE

COUNT: Final = 20
CONTEXT: Final = multiprocessing.get_context("fork")
Store = Callable[[str], object]


def tell(*words: str) -> None:
    """In one write, so that processes do not mix their lines."""
    os.write(sys.stdout.fileno(), (" ".join(words) + "\n").encode())


def call(store: Store, name: str, count: int = COUNT) -> None:
    """Store messages, and tell what became of each."""
    for n in range(count):
        id_ = f"{name}-{n}"
        try:
            store(id_)
        except (ReliablePubError, sqlite3.Error) as error:
            tell("raised", id_, type(error).__name__)
        else:
            tell("stored", id_)


def enqueuing(outbox: Outbox) -> Store:
    return lambda id_: outbox.enqueue(Message(b"", message_id=id_))


def publishing(publisher: Publisher) -> Store:
    return lambda id_: publisher.publish(b"", message_id=id_)


def ordering(path: Path, connection: sqlite3.Connection | None = None) -> Store:
    """In transactions of the application's own, each with a row of its own."""
    connection = connection or sqlite3.connect(path)

    def store(id_: str) -> None:
        with connection:
            connection.execute("INSERT INTO orders VALUES (?)", (id_,))
            Outbox(path).enqueue(Message(b"", message_id=id_), connection=connection)

    return store


def forked(work: Callable[[], None]) -> int:
    """Run it in a child that ends without cleaning up, as workers of servers do; its process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


# ------------------------------------------------------------------------------ the shapes


def worker_beside_a_publisher(path: Path) -> None:
    """`multiprocessing`, and the publisher is closed while the worker goes on."""
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
        call(publishing(publisher), "before")
        closed = CONTEXT.Event()

        def work() -> None:
            with Outbox(path) as outbox:
                call(enqueuing(outbox), "worker")
                closed.wait()
                call(enqueuing(outbox), "worker-later")

        worker = CONTEXT.Process(target=work)
        worker.start()
        call(publishing(publisher), "after")
    closed.set()
    worker.join()


def worker_with_a_database(path: Path) -> None:
    """A `multiprocessing` worker outlives the publisher, and enqueues in its own transactions."""
    sql(path, "CREATE TABLE orders (id TEXT)")
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
        call(publishing(publisher), "before")
        closed = CONTEXT.Event()

        def work() -> None:
            store = ordering(path)
            call(store, "worker")
            closed.wait()
            call(store, "worker-later")

        worker = CONTEXT.Process(target=work)
        worker.start()
    closed.set()
    worker.join()


def prefork(path: Path) -> None:
    """A server that loads the application, which makes an outbox, and then forks workers."""
    outbox = Outbox(path)
    call(enqueuing(outbox), "master")
    pids = [forked(lambda n=n: call(enqueuing(outbox), f"worker{n}")) for n in range(4)]  # type: ignore[misc]
    call(enqueuing(outbox), "master-later")
    for pid in pids:
        os.waitpid(pid, 0)


def pool(path: Path) -> None:
    """A pool whose tasks enqueue by an outbox that the parent has used."""
    global _shared  # noqa: PLW0603 - what a fork is often relied on for
    _shared = Outbox(path)
    call(enqueuing(_shared), "parent")
    with CONTEXT.Pool(2) as workers:
        workers.map(_task, range(6))


_shared: Outbox


def _task(n: int) -> None:
    call(enqueuing(_shared), f"task{n}")


def daemon(path: Path) -> None:
    """The parent ends at once, its publisher open; the child of its child goes on."""
    publisher = Publisher(NOWHERE, outbox=path)
    call(publishing(publisher), "parent")

    def child() -> None:
        def grandchild() -> None:
            os.read(ended, 1)  # until the parent has gone
            with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as own:
                call(publishing(own), "daemon")
            with Outbox(path) as outbox:
                call(enqueuing(outbox), "daemon-later")

        os.close(alive)
        forked(grandchild)

    ended, alive = os.pipe()
    os.waitpid(forked(child), 0)
    os._exit(0)


def forks_while_publishing(path: Path) -> None:
    """Threads publish and enqueue all the time, while the main thread forks again and again."""
    is_over = threading.Event()
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher, Outbox(path) as outbox:

        def go_on(store: Store, name: str) -> None:
            n = 0
            while not is_over.wait(0.001):  # SQLite's locks are not fair: leave them for a moment
                call(store, f"{name}{n}", 5)
                n += 1

        threads = [
            threading.Thread(target=go_on, args=(store, name))
            for store, name in ((publishing(publisher), "publish"), (enqueuing(outbox), "enqueue"))
        ]
        for thread in threads:
            thread.start()
        for n in range(20):
            os.waitpid(forked(lambda n=n: call(enqueuing(outbox), f"child{n}", 3)), 0)  # type: ignore[misc]
        is_over.set()
        for thread in threads:
            thread.join()


def publisher_in_the_child(path: Path) -> None:
    """What belongs to the parent is refused in the child."""
    with Publisher(NOWHERE, outbox=path, close_timeout_s=0.0) as publisher:
        call(publishing(publisher), "parent")
        os.waitpid(forked(lambda: call(publishing(publisher), "child")), 0)
        call(publishing(publisher), "parent-later")


def application_connection(path: Path) -> None:
    """The application's own connection is open at the fork."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id TEXT)")
        connection.commit()
        store = ordering(path)
        call(store, "parent")

        def child() -> None:
            call(store, "inherited")
            call(ordering(path), "new")
            call(enqueuing(Outbox(path)), "own")

        os.waitpid(forked(child), 0)
        call(store, "parent-later")


def fork_without_hooks(path: Path) -> None:
    """As a C library forks, with this package's connection open."""
    with Outbox(path) as outbox:
        call(enqueuing(outbox), "parent")
        pid = ctypes.PyDLL(None).fork()
        if pid == 0:
            call(enqueuing(outbox), "child")
            call(enqueuing(Outbox(path)), "own")
            os._exit(0)
        os.waitpid(pid, 0)
        call(enqueuing(outbox), "parent-later")


def imported_in_the_child(path: Path) -> None:
    """The application has opened its database and forked before it knows of this package."""
    program = f"""
import os, sqlite3
connection = sqlite3.connect({str(path)!r})
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("CREATE TABLE t (n)")
pid = os.fork()
if pid == 0:
    from pathlib import Path
    from reliablepub import Outbox
    from tests.surroundings.forking import call, enqueuing
    call(enqueuing(Outbox({str(path)!r})), "child")
    os._exit(0)
os.waitpid(pid, 0)
from tests.surroundings.forking import call, ordering, Path
connection.execute("CREATE TABLE orders (id)")
call(ordering(Path({str(path)!r})), "parent-later")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def closed_by_the_parent(path: Path) -> None:
    """The parent has closed its connection, and deleted the log that the child has open."""
    program = f"""
import os, sqlite3
from pathlib import Path
path = Path({str(path)!r})
connection = sqlite3.connect(path)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("CREATE TABLE orders (id TEXT)")
is_closed, closes = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(is_closed, 1)
    from tests.surroundings.forking import Outbox, call, enqueuing, ordering
    call(ordering(path, connection), "inherited")
    call(ordering(path), "new")
    call(enqueuing(Outbox(path)), "own")
    os._exit(0)
connection.close()
os.write(closes, b"!")
os.waitpid(pid, 0)
from tests.surroundings.forking import call, ordering
call(ordering(path), "parent-later")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def within_a_transaction(path: Path) -> None:
    """The forking thread is in the middle of a read that it goes on with."""
    with Outbox(path) as outbox:
        call(enqueuing(outbox), "parent")
        rows = outbox.rows("open")
        next(rows)
        os.waitpid(forked(lambda: call(enqueuing(outbox), "child")), 0)
        assert len(list(rows)) == COUNT - 1
        call(enqueuing(outbox), "parent-later")


SHAPES: Final = {
    shape.__name__: shape
    for shape in (
        *(worker_beside_a_publisher, worker_with_a_database, prefork, pool, daemon),
        *(forks_while_publishing, publisher_in_the_child, application_connection),
        *(within_a_transaction, fork_without_hooks, imported_in_the_child),
        closed_by_the_parent,
    )
}

if __name__ == "__main__":
    SHAPES[sys.argv[1]](Path(sys.argv[2]))
