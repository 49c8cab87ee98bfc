"""The worker: claim what is there, handle, commit; then wait for the next notification."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from benchmarks.peers.bare import connect
from benchmarks.peers.record import handled

_CLAIM = """
WITH next AS (SELECT id FROM queue ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED)
DELETE FROM queue USING next WHERE queue.id = next.id RETURNING queue.body
"""


def main() -> None:
    with connect() as connection, connect() as listening:
        listening.execute("LISTEN queue")
        while True:
            while _claimed(connection):
                pass
            next(listening.notifies(timeout=1, stop_after=1), None)


def _claimed(connection: psycopg.Connection[tuple[Any, ...]]) -> int:
    with connection.transaction():
        found = connection.execute(_CLAIM, binary=True).fetchall()
        for (body,) in found:
            handled(json.loads(body)["number"])
    return len(found)


if __name__ == "__main__":
    main()
