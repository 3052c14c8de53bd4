"""The wire: one client library per module; its names and exceptions stay inside."""
