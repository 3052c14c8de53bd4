"""Compares the delivered messages with the source rows; a Spark job, so it scales."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name


@dataclass(frozen=True)
class Reconciled:
    """The result of the comparison.

    Attributes:
        rows: number of expected messages.
        deliveries: number of delivered messages.
        ids: number of distinct ids among them.
        missing: rows that were not delivered.
        unknown: ids whose content equals none of the rows.
        two_bodies: ids that were delivered with more than one content.
    """

    rows: int
    deliveries: int
    ids: int
    missing: int
    unknown: int
    two_bodies: int

    @property
    def is_whole(self) -> bool:
        """Whether every row was delivered, and all other deliveries are duplicates by id."""
        return self.missing == self.unknown == self.two_bodies == 0 and self.ids == self.rows

    def __str__(self) -> str:
        """The figures on one line."""
        return (
            f"{self.rows:,} rows, {self.ids:,} ids in {self.deliveries:,} deliveries "
            f"({self.deliveries - self.ids:,} duplicates): {self.missing} missing, "
            f"{self.unknown} unknown, {self.two_bodies} ids with two contents"
        )


def reconcile(expected: DataFrame, dump: DataFrame) -> Reconciled:
    """Compare the deliveries with the expected messages.

    Args:
        expected: `value` and `routing_key` of each row.
        dump: `message_id`, `routing_key` and `value` of each delivery.
    """
    content = F.struct("routing_key", "value")
    by_id = (
        dump.groupBy("message_id")
        .agg(
            F.count("*").alias("deliveries"),
            F.count_distinct(content).alias("contents"),
            F.first(content).alias("content"),
        )
        .cache()
    )
    arrived = by_id.select("content.routing_key", "content.value")
    wanted = expected.select("routing_key", "value")
    found = by_id.agg(
        F.count("*").alias("ids"),
        F.coalesce(F.sum("deliveries"), F.lit(0)).alias("deliveries"),
        F.count_if(F.col("contents") > 1).alias("two_bodies"),
    ).collect()[0]
    result = Reconciled(
        rows=wanted.count(),
        missing=wanted.exceptAll(arrived).count(),
        unknown=arrived.exceptAll(wanted).count(),
        **found.asDict(),
    )
    by_id.unpersist()
    return result
