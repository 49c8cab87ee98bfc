"""The transaction in which a handler makes its effect."""

from __future__ import annotations

from django.db import connection


def transaction_id() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::bigint")
        return int(cursor.fetchone()[0])
