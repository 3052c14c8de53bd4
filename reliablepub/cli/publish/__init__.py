"""The command `publish`: publishes the records of a file, and reports what became of them."""
