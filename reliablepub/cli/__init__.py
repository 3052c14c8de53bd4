"""The command line: the only code of this package that prints.

Knows: the front door, the outbox and the vocabulary. Must never know: pika, SQL, or the fake
broker, whose commands it finds as entry points.
"""

from reliablepub.cli.app import main

__all__ = ["main"]
