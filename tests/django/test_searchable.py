"""A searchable topic: `outbox_install` builds its index, and the doctor names it while it is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from typing import Any

from django.core.management import call_command

from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import broker_connection
from tests.django import configured
from tests.django.support import sequence


def said(*arguments: str) -> str:
    out = StringIO()
    with suppress(SystemExit):
        call_command(*arguments, stdout=out, stderr=out, no_color=True)
    return out.getvalue()


def rows(statement: bytes) -> list[tuple[Any, ...]]:
    with broker_connection() as (connection, _):
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


INDEXES = b"""
SELECT name::text FROM pg_indexes JOIN outbox.topic ON indexname = 'commit_log_key_of_' || topic_id
WHERE schemaname = 'outbox'
"""


def test_install_builds_the_index_and_drops_it(databases: None, outbox_settings: Callable[..., None]) -> None:
    topics: dict[str, Any] = configured.OUTBOX["TOPICS"]
    outbox_settings(TOPICS={**topics, "orders": {**topics["orders"], "searchable": True}})
    assert "building the index of the keys of topic 'orders'" in said("outbox_install")
    assert rows(INDEXES) == [("orders",)]
    assert "building" not in said("outbox_install")
    receipt = publish("orders", {}, key="4711", at_once=True)
    sequence()
    [found] = json.loads(said("outbox_message", "list", "orders", "--key", "4711", "--json"))
    assert found["message_id"] == str(receipt.message_id)
    rows(b"DO $$ BEGIN EXECUTE (SELECT 'DROP INDEX outbox.' || indexname FROM pg_indexes"
         b" WHERE indexname LIKE 'commit_log_key_of_%'); END $$")  # fmt: skip
    assert "searchable topics without an index: orders" in " ".join(said("outbox_doctor").split())
    outbox_settings(TOPICS=topics)
    said("outbox_install")
    assert rows(INDEXES) == []
    assert "searchable topics" not in said("outbox_doctor")
