"""The relay: moves messages from the outbox to the broker. The one package that sees both."""
