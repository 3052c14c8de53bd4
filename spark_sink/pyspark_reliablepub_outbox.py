"""The entry point of ``reliablepub_outbox``: Spark imports top-level ``pyspark_*`` modules.

Knows: which class is the data source. Must never know: anything else. If the import of one such
module fails, Spark finds no Python data source at all.
"""

from spark_sink.outboxes import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
