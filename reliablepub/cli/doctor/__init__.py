"""The commands `doctor` and `outbox check`: what is wrong with an outbox, and what to do."""
