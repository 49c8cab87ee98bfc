"""The worker: up to sixteen messages, their handlers and their removal in one transaction, then the next notification.

If the messages are in another database, the handlers' transaction has an inbox row per message, and the messages are
removed after it.
"""

from __future__ import annotations

import json
import time

import django
from django.db import connection as application
from django.db import transaction

from benchmarks.peers import orm
from benchmarks.peers.floor.project import TWO_PHASE, Prepared, begin, connect
from benchmarks.peers.record import handled

_TAKE = """
DELETE FROM message WHERE id IN (SELECT id FROM message ORDER BY id LIMIT 16 FOR UPDATE SKIP LOCKED) RETURNING id, body
"""
_READ = "SELECT id, body FROM message JOIN decision USING (transaction_id) ORDER BY id LIMIT 16"
_INBOX = "INSERT INTO inbox SELECT unnest($1::bigint[])"
_REMOVE = """
WITH gone AS (DELETE FROM message WHERE id = ANY ($1::bigint[]) RETURNING transaction_id)
DELETE FROM decision USING gone WHERE decision.transaction_id = gone.transaction_id
"""
# Autovacuum comes too late for a queue whose rows live for milliseconds.
_VACUUM_SECONDS = 1.0


def main() -> None:
    django.setup()
    application.ensure_connection()
    with connect() as broker, connect() as listening:
        listening.execute("LISTEN message")
        take = Prepared(broker, "read", _READ) if TWO_PHASE else Prepared(application.connection, "take", _TAKE)
        inbox = Prepared(application.connection, "inbox", _INBOX)
        remove = Prepared(broker, "remove", _REMOVE)
        vacuumed = time.monotonic()
        while True:
            while _handle_some(take, inbox, remove):
                if time.monotonic() - vacuumed > _VACUUM_SECONDS:
                    listening.execute("VACUUM message, decision")
                    vacuumed = time.monotonic()
            next(listening.notifies(timeout=1, stop_after=1), None)


def _handle_some(take: Prepared, inbox: Prepared, remove: Prepared) -> int:
    with transaction.atomic():
        begin(application.connection)
        found = take()
        ids = f"{{{','.join((row[0] or b'').decode() for row in found)}}}"
        if TWO_PHASE and found:
            inbox(ids)
        for _, body in found:
            number = json.loads(body or b"")["number"]
            handled(number)
            orm.write_effect(number)
    if TWO_PHASE and found:
        remove(ids)
    return len(found)


if __name__ == "__main__":
    main()
