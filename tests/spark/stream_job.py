"""A stream from a folder of text files to the sink, as a program of its own, to be killed.

Knows: how to start Spark and a query. Must never know: what is killed.

It ends when all that is in the folder has been written; started again, it goes on from its
checkpoint.
"""

import argparse
import os
import sys

from pyspark.sql import SparkSession


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--option", action="append", default=[])
    arguments = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 2).load(arguments.source)
    query = (
        lines.writeStream.format("rabbitmq")
        .options(**dict(option.split("=", 1) for option in arguments.option))
        .option("checkpointLocation", arguments.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
