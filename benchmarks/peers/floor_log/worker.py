"""The worker: one tick, up to sixteen handlers in one transaction, and the offset; then the next notification."""

from __future__ import annotations

import json

import django
from django.db import connection as application
from django.db import transaction

from benchmarks.peers import orm
from benchmarks.peers.floor.project import Prepared, begin, connect
from benchmarks.peers.record import handled

# What this statement sees and the last tick did not see, in the order of the log; a tick without news leaves no row.
_TICK = """
WITH last AS (SELECT seen, head FROM tick ORDER BY id DESC LIMIT 1),
     fresh AS (
         SELECT log_id FROM last, decision
         WHERE xid >= pg_snapshot_xmin(seen) AND NOT pg_visible_in_snapshot(xid, seen)
     ),
     added AS (
         INSERT INTO entry
         SELECT head + row_number() OVER (ORDER BY log_id), log_id FROM last, fresh
         RETURNING position, log_id
     ),
     ticked AS (
         INSERT INTO tick (seen, head)
         SELECT pg_current_snapshot(), max(position) FROM added HAVING count(*) > 0
     )
SELECT position, id, body FROM added JOIN log ON id = log_id ORDER BY position
"""
_INBOX = "INSERT INTO inbox VALUES ($1::bigint)"
_OFFSET = "UPDATE consumer SET position = $1::bigint"
_BATCH = 16


def main() -> None:
    django.setup()
    application.ensure_connection()
    with connect() as broker, connect() as listening:
        listening.execute("LISTEN log")
        # A server that forgets a tick or an offset forgets what it caused as well, or the inbox knows it.
        broker.execute("SET synchronous_commit = off")
        tick = Prepared(broker, "tick", _TICK)
        offset = Prepared(broker, "offset", _OFFSET)
        inbox = Prepared(application.connection, "inbox", _INBOX)
        while True:
            while found := tick():
                for first in range(0, len(found), _BATCH):
                    some = found[first : first + _BATCH]
                    _handle(some, inbox)
                    offset((some[-1][0] or b"").decode())
            next(listening.notifies(timeout=1, stop_after=1), None)


def _handle(messages: list[list[bytes | None]], inbox: Prepared) -> None:
    with transaction.atomic():
        begin(application.connection)
        savepoint = application.connection.pgconn.exec_
        for number, (_, log_id, body) in enumerate(messages):
            savepoint(b"RELEASE handler; SAVEPOINT handler" if number else b"SAVEPOINT handler")
            order = json.loads(body or b"")["number"]
            handled(order)
            orm.write_effect(order)
            inbox((log_id or b"").decode())


if __name__ == "__main__":
    main()
