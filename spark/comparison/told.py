"""What the broker knows of single messages beside their state: for what a finding tells, not for what it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ..errors import ReconcileError
from ..output import masking
from ..rules.rule import Rule
from ..sources.base import TableSelection
from ..sources.postgres import PostgresSource
from .sides import UUID, Sources

MAX_MESSAGES: Final = 1_000
# The newest of each message: a parked half is asked for every hour.
MAX_EACH: Final = 10
_PLACES: Final = """
SELECT log_id, string_agg(concat('retry of ' || retry_group || ', ', 'queue ', number, ', offset ', queue_offset),
                          '; ' ORDER BY attempt, queue_id, queue_offset)
FROM {view} WHERE log_id = ANY('{{{ids}}}'::bigint[]) GROUP BY log_id
"""
_CHECKS: Final = """
SELECT transaction_id::text, checked_at, answer, detail
FROM (SELECT *, row_number() OVER (PARTITION BY transaction_id ORDER BY checked_at DESC) AS place
      FROM {view} WHERE transaction_id = ANY('{{{ids}}}'::uuid[])) newest
WHERE place <= {most} ORDER BY transaction_id, checked_at
"""
_FAILURES: Final = """
SELECT log_id, consumer_group, attempt, failed_at, error
FROM (SELECT *, row_number() OVER (PARTITION BY log_id, consumer_group ORDER BY attempt DESC) AS place
      FROM {view} WHERE log_id = ANY('{{{ids}}}'::bigint[])) newest
WHERE place <= {most} ORDER BY log_id, consumer_group, attempt
"""
_SCHEMA: Final = (
    "log_id bigint, queue string, checks array<struct<checked_at: timestamp, answer: string, detail: string>>, "
    "failures array<struct<consumer_group: string, attempt: int, failed_at: timestamp, error: string>>"
)


def of(spark: SparkSession, sources: Sources, messages: DataFrame, rule: Rule) -> DataFrame:
    """Of `messages` by `log_id`: queue and offset (`queue`), the newest check-backs, the newest failed attempts.

    Empty where that cannot be had: in exports, without the right to read the views, from a broker that does not have
    them yet, and of more than MAX_MESSAGES, as where so much is wrong nobody follows single messages. Errors are free
    text that may repeat any field: a rule that masks something shows none.
    """
    broker, rows = sources.broker, []
    if isinstance(broker, PostgresSource):
        ids = messages.select("log_id", "transaction_id").distinct().limit(MAX_MESSAGES + 1).collect()
        if 0 < len(ids) <= MAX_MESSAGES:
            rows = list(_rows(broker, {int(row[0]): str(row[1]) for row in ids}, rule))
    return F.broadcast(spark.createDataFrame(rows, _SCHEMA))


def _rows(broker: PostgresSource, transactions: dict[int, str], rule: Rule) -> Iterable[tuple[Any, ...]]:
    numbers = ",".join(str(number) for number in sorted(transactions))
    # Out of an archive they are only what somebody wrote into a file.
    names = ",".join(sorted({name for name in transactions.values() if UUID.fullmatch(name)}))
    places = {row[0]: row[1] for row in _asked(broker, "queue_entry_v1", _PLACES, numbers)}
    checks, failures = _asked(broker, "check_v1", _CHECKS, names), _asked(broker, "failure_v1", _FAILURES, numbers)
    for log_id, transaction_id in transactions.items():
        asked = [(at, answer, _text(rule, text)) for of, at, answer, text in checks if of == transaction_id]
        failed = [(group, int(n), at, _text(rule, text)) for of, group, n, at, text in failures if of == log_id]
        yield log_id, places.get(log_id), asked, failed


def _text(rule: Rule, text: str) -> str:
    return masking.HIDDEN if rule.mask and text else text


def _asked(broker: PostgresSource, view: str, statement: str, ids: str) -> list[tuple[Any, ...]]:
    table = broker.table_of(TableSelection(table=view, columns=(), key="log_id", in_broker=True))
    try:
        return broker.attempt(statement.format(view=table, ids=ids, most=MAX_EACH), about=f"the broker's view {view}")
    except ReconcileError:
        return []
