"""One process of the ceiling of draining: it claims batches from a bare table by deleting them.

`python -m benchmarks.claiming --database URL` says "ready", begins with the next line of its standard input, and says
"done" when the table is empty.
"""

from __future__ import annotations

import argparse
import sys

import psycopg

BATCH = 500
_CLAIM = """
    WITH next AS (SELECT id FROM queue ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
    DELETE FROM queue USING next WHERE queue.id = next.id RETURNING queue.id, queue.body
"""


def claim_all(connection: psycopg.Connection) -> None:
    while connection.execute(_CLAIM, [BATCH], binary=True).fetchall():
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    with psycopg.connect(parser.parse_args().database, autocommit=True) as connection:
        print("ready", flush=True)
        sys.stdin.readline()
        claim_all(connection)
        print("done", flush=True)


if __name__ == "__main__":
    main()
