"""Transports: one module for each client library, which hides that library's names and errors."""
