"""Installed as a module of its own at the top level, where Spark looks for data sources.

Knows: which class is the data source. Must never know: anything else. If importing it failed, Spark
would find no Python data source at all, of anybody's.
"""

from spark_sink.datasource import RabbitMQDataSource as DefaultSource

__all__ = ["DefaultSource"]
