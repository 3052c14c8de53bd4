"""The durable table between the application and the broker."""
