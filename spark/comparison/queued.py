"""Where messages stand in the broker's queues: for what a finding tells, not for what it is."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ..errors import ReconcileError
from ..sources.base import Selection
from ..sources.postgres import PostgresSource
from .sides import Sources

MAX_MESSAGES: Final = 1_000
_SCHEMA: Final = "log_id bigint, queue string"
_ENTRIES: Final = """
SELECT log_id, string_agg(concat('retry of ' || retry_group || ', ', 'queue ', number, ', offset ', queue_offset),
                          '; ' ORDER BY attempt, queue_id, queue_offset)
FROM {view} WHERE log_id = ANY('{{{ids}}}'::bigint[]) GROUP BY log_id
"""


def places(spark: SparkSession, sources: Sources, messages: DataFrame) -> DataFrame:
    """Queue and offset (`queue`) of `messages` by `log_id`.

    Empty where that cannot be had: in exports, without the right to read `queue_entry_v1`, and of more than
    MAX_MESSAGES, as where so much is wrong nobody follows single messages.
    """
    broker, known = sources.broker, []
    if isinstance(broker, PostgresSource):
        ids = [row[0] for row in messages.select("log_id").distinct().limit(MAX_MESSAGES + 1).collect()]
        if 0 < len(ids) <= MAX_MESSAGES:
            view = broker.table_of(Selection(table="queue_entry_v1", columns=(), key="log_id", in_broker=True))
            statement = _ENTRIES.format(view=view, ids=",".join(str(number) for number in sorted(ids)))
            try:
                known = broker.attempt(statement, about="the places of messages in the queues")
            except ReconcileError:
                known = []
    return F.broadcast(spark.createDataFrame([(int(log_id), str(text)) for log_id, text in known], _SCHEMA))
