"""Faults: rules that say how and when the broker misbehaves.

This package knows when a rule acts. It must never know how the broker carries out a fault.
"""

from reliablepub.testing.faults.answers import (
    DelayConfirm,
    DelayReturn,
    DropConfirm,
    DropReturn,
    DuplicateConfirm,
    HoldConfirms,
    LateReturn,
    Nack,
    Return,
    ShuffleConfirms,
    StrayAck,
)
from reliablepub.testing.faults.deliveries import (
    CancelConsumer,
    DelayDelivery,
    LoseAck,
    RepeatDelivery,
)
from reliablepub.testing.faults.events import (
    Block,
    CloseChannel,
    CloseConnection,
    Crash,
    DeleteExchange,
    DeleteQueue,
    DropConnection,
    EndingFault,
    Freeze,
    HalfOpen,
)
from reliablepub.testing.faults.files import KINDS, FaultFileError, fault_of, load_faults
from reliablepub.testing.faults.mix import AnyOf
from reliablepub.testing.faults.network import (
    STEPS,
    Bandwidth,
    CutStream,
    HandshakeFault,
    Latency,
    RefuseHandshake,
    SliceOutput,
    StallHandshake,
)
from reliablepub.testing.faults.rule import ConnectionFault, DeliveryFault, Fault, PublishFault
from reliablepub.testing.faults.script import FaultScript

__all__ = [
    "KINDS",
    "STEPS",
    "AnyOf",
    "Bandwidth",
    "Block",
    "CancelConsumer",
    "CloseChannel",
    "CloseConnection",
    "ConnectionFault",
    "Crash",
    "CutStream",
    "DelayConfirm",
    "DelayDelivery",
    "DelayReturn",
    "DeleteExchange",
    "DeleteQueue",
    "DeliveryFault",
    "DropConfirm",
    "DropConnection",
    "DropReturn",
    "DuplicateConfirm",
    "EndingFault",
    "Fault",
    "FaultFileError",
    "FaultScript",
    "Freeze",
    "HalfOpen",
    "HandshakeFault",
    "HoldConfirms",
    "LateReturn",
    "Latency",
    "LoseAck",
    "Nack",
    "PublishFault",
    "RefuseHandshake",
    "RepeatDelivery",
    "Return",
    "ShuffleConfirms",
    "SliceOutput",
    "StallHandshake",
    "StrayAck",
    "fault_of",
    "load_faults",
]
