"""What operators do with an outbox: look, step in, prune, check, repair, copy."""
