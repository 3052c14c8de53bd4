"""The command `publish`: publishes the records of a file, and reports their outcomes."""
