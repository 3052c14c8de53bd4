"""What can go wrong with a real RabbitMQ, by name: each makes one incident, and mends it again.

An incident lasts for seconds, and the publisher is under load all the while. It knows brokers and
networks; it must never know the publisher.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.chaos.arena import Arena

Incident = Callable[[Arena], None]


@dataclass(frozen=True)
class Scenario:
    """One kind of incident.

    Attributes:
        happen: makes one.
        is_short: whether it is part of every run of the tests.
        is_clustered: whether it needs three nodes.
    """

    happen: Incident
    is_short: bool = False
    is_clustered: bool = False


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(
    *, is_short: bool = False, is_clustered: bool = False
) -> Callable[[Incident], Incident]:
    def register(happen: Incident) -> Incident:
        name = happen.__name__.replace("_", " ")
        SCENARIOS[name] = Scenario(happen, is_short, is_clustered)
        return happen

    return register


# ---------------------------------------------------------------------- the broker


@scenario()
def broker_killed(arena: Arena) -> None:
    arena.wait_until_queues_outlive_a_kill()
    arena.node.kill()
    arena.node.start()


@scenario()
def broker_killed_while_it_recovers(arena: Arena) -> None:
    arena.wait_until_queues_outlive_a_kill()
    for _ in range(2):
        arena.node.kill()
        arena.node.start()


@scenario()
def broker_restarted_in_order(arena: Arena) -> None:
    arena.node.stop()
    arena.node.start()


@scenario()
def application_stopped_and_started(arena: Arena) -> None:
    arena.node.ctl("stop_app")
    arena.node.ctl("start_app")


@scenario(is_short=True)
def broker_frozen_for_a_moment(arena: Arena) -> None:
    arena.node.pause()
    time.sleep(1.0)
    arena.node.resume()


@scenario()
def broker_frozen_for_longer_than_a_heartbeat(arena: Arena) -> None:
    arena.node.pause()
    time.sleep(8.0)
    arena.node.resume()


@scenario()
def memory_alarm(arena: Arena) -> None:
    arena.node.set_memory_alarm()
    time.sleep(5.0)
    arena.node.clear_memory_alarm()


@scenario()
def memory_alarm_while_connections_are_cut(arena: Arena) -> None:
    arena.node.set_memory_alarm()
    time.sleep(1.0)
    arena.proxy.cut()
    time.sleep(2.0)
    arena.node.clear_memory_alarm()


@scenario(is_short=True)
def all_connections_closed_by_an_operator(arena: Arena) -> None:
    arena.node.close_all_connections("closed by an operator")


@scenario()
def connection_process_killed(arena: Arena) -> None:
    arena.node.eval("[exit(P, kill) || P <- rabbit_networking:connections()].")


@scenario()
def channel_process_killed(arena: Arena) -> None:
    arena.node.eval("[exit(P, kill) || P <- rabbit_channel:list()].")


# ---------------------------------------------------------------------- queues and exchanges


@scenario()
def classic_queue_process_killed(arena: Arena) -> None:
    """Not oftener than its supervisor bears: dead for the sixth time in 10 s, it stays so.

    (rabbit_amqqueue_sup: ``amqqueue_max_restart_intensity``, {5, 10}. Then all is nacked.)
    """
    arena.node.eval(f"exit({_pid(arena, 'classic')}, kill).")
    time.sleep(2.0)


@scenario()
def classic_queue_suspended(arena: Arena) -> None:
    arena.node.eval(f"sys:suspend({_pid(arena, 'classic')}).")
    time.sleep(6.0)  # longer than a confirm may take
    arena.node.eval(f"sys:resume({_pid(arena, 'classic')}).")


@scenario()
def quorum_queue_process_killed(arena: Arena) -> None:
    """Not oftener than its supervisor bears: dead for the third time in 5 s, it stays so.

    (ra_server_sup: ``intensity => 2, period => 5``. Then every message to it is nacked.)
    """
    arena.node.eval(f"exit({_leader(arena)}, kill).")
    time.sleep(3.0)


@scenario()
def quorum_queue_suspended(arena: Arena) -> None:
    arena.node.eval(f"sys:suspend({_leader(arena)}).")
    time.sleep(6.0)
    arena.node.eval(f"sys:resume({_leader(arena)}).")


@scenario(is_short=True)
def binding_removed(arena: Arena) -> None:
    arena.probe.unbind(arena.queues["classic"], arena.exchange, "classic")
    time.sleep(0.5)
    arena.bind("classic")


@scenario()
def exchange_deleted(arena: Arena) -> None:
    arena.probe.delete_exchange(arena.exchange)
    time.sleep(0.5)
    arena.probe.declare_exchange(arena.exchange)
    for key in arena.queues:
        arena.bind(key)


@scenario()
def permission_taken_away(arena: Arena) -> None:
    arena.node.set_permissions("guest", write="nothing")
    arena.proxy.cut()  # a channel goes on with what it knows
    time.sleep(1.0)
    arena.node.set_permissions("guest")


@scenario()
def password_changed(arena: Arena) -> None:
    arena.node.change_password("guest", "another")
    arena.proxy.cut()
    time.sleep(1.0)
    arena.node.change_password("guest", "guest")


# ---------------------------------------------------------------------- the network


@scenario(is_short=True)
def network_cut(arena: Arena) -> None:
    for _ in range(3):
        arena.proxy.cut()
        time.sleep(0.3)


@scenario(is_short=True)
def answers_withheld_and_then_cut(arena: Arena) -> None:
    """The broker takes everything, and none of its confirms arrives."""
    arena.proxy.is_silent_down = True
    time.sleep(0.5)
    arena.proxy.cut()
    arena.proxy.heal()


@scenario()
def network_silent(arena: Arena) -> None:
    """Nothing passes, and neither side is told."""
    arena.proxy.is_silent_up = arena.proxy.is_silent_down = True
    time.sleep(8.0)
    arena.proxy.heal()


@scenario()
def network_slow(arena: Arena) -> None:
    arena.proxy.latency_s, arena.proxy.bytes_per_s = 0.05, 100_000.0
    time.sleep(8.0)
    arena.proxy.heal()


@scenario(is_short=True)
def network_loses_connections(arena: Arena) -> None:
    """In small pieces, one of a hundred of which is the last of its connection."""
    arena.proxy.piece_bytes, arena.proxy.resets = 200, 0.01
    time.sleep(1.0)
    arena.proxy.heal()


@scenario()
def network_byte_by_byte(arena: Arena) -> None:
    arena.proxy.piece_bytes = 1
    time.sleep(3.0)
    arena.proxy.heal()


# ---------------------------------------------------------------------- a cluster of three


@scenario(is_clustered=True)
def nodes_killed_one_after_another(arena: Arena) -> None:
    arena.wait_until_queues_outlive_a_kill()
    for node in arena.nodes:
        node.kill()
        time.sleep(3.0)
        node.start()


@scenario(is_clustered=True)
def nodes_frozen_one_after_another(arena: Arena) -> None:
    for node in arena.nodes:
        node.pause()
        time.sleep(6.0)
        node.resume()
        time.sleep(1.0)


@scenario(is_clustered=True)
def nodes_restarted_one_after_another(arena: Arena) -> None:
    for node in arena.nodes:
        node.stop()
        node.start()


@scenario(is_clustered=True)
def majority_killed(arena: Arena) -> None:
    """Nothing can be confirmed until one of the two is back."""
    arena.wait_until_queues_outlive_a_kill()
    for node in arena.nodes[1:]:
        node.kill()
    time.sleep(3.0)
    for node in arena.nodes[1:]:
        node.start()


# ---------------------------------------------------------------------- inside


def _pid(arena: Arena, key: str) -> str:
    """An Erlang expression: the process of a classic queue."""
    resource = f'rabbit_misc:r(<<"/">>, queue, <<"{arena.queues[key]}">>)'
    return f"amqqueue:get_pid(element(2, rabbit_amqqueue:lookup({resource})))"


def _leader(arena: Arena) -> str:
    """An Erlang expression: the process of a quorum queue."""
    return f"whereis('%2F_{arena.queues['quorum']}')"
