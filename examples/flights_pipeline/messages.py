"""Makes messages from tables, by functions that serve batches and streams."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from table import END

FLIGHT = (
    "carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, "
    "sched_dep_time INT, dep_delay INT, time_hour TIMESTAMP"
)
_COLUMNS = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, "
    "sched_arr_time INT, arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, "
    "dest STRING, air_time INT, distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)
_LATE_MIN = 15


def read_csv(spark: SparkSession, folder: Path) -> DataFrame:
    """Read all flights as a batch."""
    reader = spark.read.schema(_COLUMNS).options(header=True, nullValue="NA")
    return _clean(reader.csv(str(folder / "flights")))


def read_csv_stream(spark: SparkSession, folder: Path) -> DataFrame:
    """Read the flights as a stream of files, oldest first; a flight may be two days late."""
    reader = spark.readStream.schema(_COLUMNS).options(
        header=True, nullValue="NA", maxFilesPerTrigger=3
    )
    return _clean(reader.csv(str(folder / "flights"))).withWatermark("time_hour", "2 days")


def joined(flights: DataFrame, spark: SparkSession, folder: Path) -> DataFrame:
    """Join each flight with its weather and its plane, if they are known."""
    reader = spark.read.options(header=True, nullValue="NA", inferSchema=True)
    weather = (
        reader.csv(str(folder / "weather.csv"))
        .select("origin", "time_hour", "temp", "wind_speed", "precip")
        .dropDuplicates(
            ["origin", "time_hour"]
        )  # the hour that repeats when daylight saving time ends
    )
    planes = reader.csv(str(folder / "planes.csv")).select("tailnum", "manufacturer", "seats")
    return flights.join(F.broadcast(weather), ["origin", "time_hour"], "left").join(
        F.broadcast(planes), ["tailnum"], "left"
    )


def hourly(flights: DataFrame) -> DataFrame:
    """Departures by airport and hour. Sums of whole numbers do not depend on the row order."""
    return (
        flights.groupBy(F.window("time_hour", "1 hour"), "origin")
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_delay").alias("departed"),
            F.sum("dep_delay").alias("delay_min"),
        )
        .where(F.col("window.start") < END)
        .select(F.col("window.start").alias("from"), "origin", "flights", "departed", "delay_min")
    )


def as_messages(rows: DataFrame) -> DataFrame:
    """JSON objects with routing keys such as `<carrier>.late` or `hour.<airport>`."""
    is_hourly = "delay_min" in rows.columns
    if not is_hourly:
        rows = rows.where(F.col("time_hour") < END)
    key = (
        F.concat(F.lit("hour."), "origin")
        if is_hourly
        else F.concat(
            "carrier",
            F.when(F.col("dep_delay").isNull(), ".cancelled")
            .when(F.col("dep_delay") > _LATE_MIN, ".late")
            .otherwise(".on_time"),
        )
    )
    return rows.select(F.to_json(F.struct("*")).alias("value"), key.alias("routing_key"))


def _clean(flights: DataFrame) -> DataFrame:
    return flights.drop("year", "month", "day", "hour", "minute").where("carrier IS NOT NULL")
