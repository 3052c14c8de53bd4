"""The command `watch`: a live view of an outbox in the terminal."""
