"""The command line, ``reliablepub``; no other module of this package prints.

Knows: the publishers, the outbox and the vocabulary. Must never know: pika, SQL, or the fake
broker, whose commands are loaded through entry points.
"""

from reliablepub.cli.app import main

__all__ = ["main"]
