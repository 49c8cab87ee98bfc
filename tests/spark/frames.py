"""Histories as the data frames that sources deliver."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from spark.judging import classify, evidence
from spark.rules.rule import Messages, Rule
from spark.stages.prepare import PreparedRule
from tests.spark import oracle

_TIME = pa.timestamp("us", tz="UTC")
_TABLE = pa.schema(
    [("kind", pa.int64()), ("key", pa.string()), ("at", _TIME), *[(f"f{n}", pa.string()) for n in range(3)]]
)
_BROKER = pa.schema(
    [
        ("key", pa.string()),
        ("log_id", pa.int64()),
        ("at", _TIME),
        ("decided_at", _TIME),
        ("decided_by", pa.string()),
        ("deliver_at", _TIME),
        ("state", pa.string()),
        ("content_type", pa.string()),
        ("body", pa.binary()),
    ]
)
WINDOW = classify.Window(oracle.SINCE, oracle.UNTIL, oracle.WATERMARK)


def whole(rule: Rule) -> PreparedRule:
    """The rule as a run prepares it that judges everything up to now."""
    window = classify.Window(None, datetime.now(UTC), datetime.now(UTC))
    return PreparedRule(rule=rule, window=window, missing_views=frozenset(), looked_back=None, notes=[])


def classified(
    spark: SparkSession, histories: Mapping[str, oracle.History], kind: Messages = Messages.EXACTLY_ONE
) -> DataFrame:
    """The subjects (classify.subjects) of all histories, by their keys."""
    rule = oracle.rule(kind)
    table, broker = _table(histories), _broker(histories)
    sides = [
        evidence.table_side(spark.createDataFrame(table), rule),
        evidence.broker_side(spark.createDataFrame(broker), rule),
    ]
    return classify.subjects(
        classify.with_classes(evidence.gather(sides, rule, oracle.WATERMARK), rule, WINDOW), rule, WINDOW
    )


def classes(
    spark: SparkSession, histories: Mapping[str, oracle.History], kind: Messages = Messages.EXACTLY_ONE
) -> Found:
    """(key, group) -> (class, flags)."""
    rows = classified(spark, histories, kind).select("key", "group", "class", "flags").collect()
    return {(row["key"], row["group"]): (row["class"], set(row["flags"])) for row in rows}


Found = dict[tuple[str, str], tuple[str, set[str]]]


def _table(histories: Mapping[str, oracle.History]) -> pa.Table:
    out: list[dict[str, object]] = []
    for key, history in histories.items():
        for row in history.rows:
            weight = None if row.weight is None else str(row.weight)
            values = {"f0": row.customer, "f1": str(row.total), "f2": weight}
            out.append({"kind": 0, "key": key, "at": row.at, **values})
        for number, effects in enumerate(history.effects):
            out += [{"kind": 10 + number, "key": key, "at": at} for at in effects]
    return pa.Table.from_pylist(out, _TABLE)


def _broker(histories: Mapping[str, oracle.History]) -> pa.Table:
    out: list[dict[str, object]] = []
    for key, history in histories.items():
        for message in history.messages:
            out.append(
                {
                    "key": key,
                    "log_id": len(out) + 1,
                    "at": message.stored_at,
                    "decided_at": message.decided_at,
                    "decided_by": message.decided_by,
                    "deliver_at": message.deliver_at,
                    "state": message.state,
                    "content_type": "application/json",
                    "body": message.body,
                }
            )
        for number, is_dead in enumerate(history.dead):
            if is_dead:
                state = f"dead {oracle.GROUPS[number]}"
                out.append({"key": key, "log_id": len(out) + 1, "at": datetime.now(UTC), "state": state})
    return pa.Table.from_pylist(out, _BROKER)
