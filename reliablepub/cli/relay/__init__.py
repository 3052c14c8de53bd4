"""The command `relay`: publishes what an outbox holds, until it is stopped."""
