"""Converts the bodies of old versions of an event to the version that a rule compares.

Bodies of the compared version pass without a call of Python. The others run the project's `@upcast` functions, because
neither SQL nor a map of fields can say what a Python function does. A change of a function does not judge old rows
again in incremental runs.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ..rules.rule import EventRule, Rule

# The content type of a body that cannot be converted begins with this text, and goes on with the reason.
NOT_CONVERTED: Final = "the body cannot be read as "
_HEADERS: Final = "`outbox-event` string, `outbox-event-version` string"
_RESULT: Final = "body string, problem string"


def converted(messages: DataFrame, rule: Rule) -> DataFrame:
    """Replace each body of an old version by the body of the version that the rule compares.

    `messages` has the columns content_type, body and headers; the result has no headers. If a body cannot be converted,
    its content type says why. If the rule names no event, the result is `messages`.
    """
    event = rule.event
    if event is None:
        return messages
    header = F.from_json("headers", _HEADERS)
    name = F.coalesce(header["outbox-event"], F.lit(event.name))
    version = F.coalesce(header["outbox-event-version"], F.lit("1"))
    is_current = (name == F.lit(event.name)) & (version == F.lit(str(event.version)))
    is_json = F.coalesce(F.col("content_type").startswith("application/json"), F.lit(False))
    is_old = F.coalesce(is_json & ~is_current, F.lit(False))
    # Spark calls a Python function for every row, even inside of WHEN. So the function gets null instead of a body that
    # needs no conversion.
    convert = F.udf(_converter(event, is_masked=bool(rule.mask)), _RESULT, useArrow=False)
    changed = convert(F.when(is_old, F.col("body").cast("string")), name, version)
    with_result = messages.withColumns({"is_old": is_old, "changed": changed})
    problem = F.concat(F.lit(f"{NOT_CONVERTED}version {event.version} of {event.name}: "), "changed.problem")
    return with_result.withColumns(
        {
            "body": F.when(F.col("is_old"), F.col("changed.body").cast("binary")).otherwise(F.col("body")),
            "content_type": F.when(F.col("is_old") & F.col("changed.problem").isNotNull(), problem).otherwise(
                F.col("content_type")
            ),
        }
    ).drop("headers", "is_old", "changed")


def _converter(event: EventRule, *, is_masked: bool) -> Callable[..., tuple[str | None, str | None] | None]:
    """Return the function that converts one body. With `is_masked`, its errors do not repeat values of the body."""
    upcasts, expected = dict(event.upcasts), f"{event.name} version {event.version}"

    def convert(body: str | None, name: str, version: str) -> tuple[str | None, str | None] | None:
        if body is None:
            return None
        chain = upcasts.get((name, int(version))) if version.isascii() and version.isdigit() else None
        if chain is None:
            return None, (
                f"no @upcast leads from {name} version {version} to {expected}. Declare it, or name the modules that do"
            )
        try:
            found = json.loads(body)
        except json.JSONDecodeError:
            # The comparison says what is wrong with the text.
            return body, None
        except (ValueError, RecursionError) as error:
            # Python's parser has limits for the depth and for the digits of a number.
            return None, str(error)
        try:
            for change in chain:
                found = change(found)
                if not isinstance(found, (dict, list)):
                    # A function may return an event of the expected type; then the chain ends there.
                    break
            return json.dumps(_plain(found), ensure_ascii=False, default=_plain), None
        except Exception as error:
            text = type(error).__name__ if is_masked else f"{type(error).__name__}: {error}"
            return None, f"@upcast failed at {name} version {version}: {text}"

    return convert


def _plain(value: Any) -> Any:
    """Return an event, or a value of one of its fields, as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__struct_fields__"):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, (dict, list)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
