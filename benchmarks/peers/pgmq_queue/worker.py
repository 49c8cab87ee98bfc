"""The worker: read up to a hundred, looking every 10 ms, handle, archive.

It polls, because pgmq's notifications are at most one in 250 ms; unthrottled they update one row in every sending
transaction, which makes commits wait for each other.
"""

from __future__ import annotations

from benchmarks.peers.bare import connect
from benchmarks.peers.record import handled

_READ = """
SELECT msg_id, message FROM pgmq.read_with_poll('orders', vt => 30, qty => 100, max_poll_seconds => 5,
                                                poll_interval_ms => 10)
"""


def main() -> None:
    with connect() as connection:
        while True:
            found = connection.execute(_READ).fetchall()
            for _, body in found:
                handled(body["number"])
            if found:
                connection.execute("SELECT pgmq.archive('orders', %s::bigint[])", [[number for number, _ in found]])


if __name__ == "__main__":
    main()
