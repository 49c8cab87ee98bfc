"""The same comparison by datacompy, run by the Python of an environment that has it: FOLDER MASTER."""

from __future__ import annotations

import json
import sys
import time


def main(folder: str, master: str) -> None:
    """Compare orders with the fields of the message bodies."""
    from datacompy import SparkSQLCompare
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    settings = {"spark.sql.session.timeZone": "UTC", "spark.driver.memory": "3g", "spark.ui.enabled": "false"}
    builder = SparkSession.builder.master(master).config("spark.sql.shuffle.partitions", "32")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    started = time.perf_counter()
    orders = spark.read.parquet(f"{folder}/orders_order").select("id", "customer", "total", "paid_at")
    schema = "order_id bigint, customer string, total decimal(12,2), paid_at timestamp"
    body = F.from_json(F.col("body").cast("string"), schema)
    messages = (
        spark.read.parquet(f"{folder}/message_v1")
        .select(body.alias("b"))
        .select(F.col("b.order_id").alias("id"), "b.customer", "b.total", "b.paid_at")
    )
    assert SparkSQLCompare(spark, orders, messages, join_columns=["id"]).matches()
    print(json.dumps({"seconds": time.perf_counter() - started}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
