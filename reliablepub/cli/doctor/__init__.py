"""The command `doctor`: what is wrong with an outbox, its relay and its broker, and what to do."""
