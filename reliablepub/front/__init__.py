"""The publishers that applications import: `Publisher`, `AsyncPublisher`, and their receipts."""
