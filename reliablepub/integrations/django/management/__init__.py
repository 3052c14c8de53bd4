"""The package in which `manage.py` looks for commands."""
