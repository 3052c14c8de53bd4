"""A batch write as a program of its own, for tests that kill parts of it.

Knows: how to start Spark on any master. Must never know: what is killed.

``--shuffle`` gives each task the rows of a shuffle, so that their order differs from try to try.
``--register`` is for Pythons that do not have the sink installed.
"""

import argparse
import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

BODY_BYTES = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--conf", action="append", default=[])
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--register", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(arguments.master)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "600m")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.task.maxFailures", "8")
    )
    for name, value in (conf.split("=", 1) for conf in arguments.conf):
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if arguments.register:
        from spark_sink import RabbitMQDataSource  # noqa: PLC0415 - it may have been shipped

        spark.dataSource.register(RabbitMQDataSource)
    df = spark.range(0, arguments.rows, 1, arguments.partitions)
    if arguments.shuffle:
        df = df.repartition(arguments.partitions, F.col("id"))
    messages = df.select(F.rpad(F.col("id").cast("string"), BODY_BYTES, " ").alias("value"))
    options = dict(option.split("=", 1) for option in arguments.option)
    messages.write.format("rabbitmq").options(**options).mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main()
