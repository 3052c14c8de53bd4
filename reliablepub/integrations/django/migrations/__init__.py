"""The migrations of the application."""
