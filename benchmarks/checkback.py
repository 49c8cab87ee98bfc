"""Check-back: a million half messages of which one in a hundred is undecided, found and resolved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import psycopg

from benchmarks.bulk import prepared
from benchmarks.harness import Spread, server, table
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.checkback import CheckBack
from outbox.transaction import Answer, Check, CheckSettings, Decision

HALVES = 1_000_000
UNDECIDED_EVERY = 100
IDLE_SIZES = (10_000, 100_000, 1_000_000)
REPEATS = 3

_FILL = """
    WITH stored AS (
        INSERT INTO outbox.commit_log (born_at, stored_at, transaction_id, message_id, topic_id, half, producer_group,
            key, tag, content_type, body)
        SELECT now(), now() - interval '1 hour', id, id, (SELECT min(topic_id) FROM outbox.topic), true, 'bench',
            '', '', 'application/json', '{"n":1}'
        FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, %s)) AS ids
        RETURNING log_id, transaction_id
    )
    INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
    SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM stored WHERE log_id %% %s <> 0
"""


class Committed:
    """Answers at once, so that only the broker's part is measured."""

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        for check in checks:
            yield Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT)


def main() -> None:
    print(f"\ncheck-back: {HALVES:,} half messages, one in {UNDECIDED_EVERY} undecided, {REPEATS} runs")
    resolving: list[float] = []
    idle: dict[int, list[float]] = {size: [] for size in IDLE_SIZES}
    with server() as url:
        for run in range(REPEATS):
            resolving.append(resolve(embedded.create_database(url, f"check_{run}")))
            for size in IDLE_SIZES:
                idle[size].append(idle_pass(embedded.create_database(url, f"idle_{run}_{size}"), size))
    table(
        "found and resolved (median, low to high)",
        ["halves", "undecided", "seconds"],
        [
            [f"{HALVES:,}", f"{HALVES // UNDECIDED_EVERY:,}", f"{Spread.of(resolving):.2f}"],
        ],
    )
    table(
        "a pass with nothing to do (median, low to high)",
        ["halves in the log", "milliseconds"],
        [[f"{size:,}", f"{Spread.of([seconds * 1e3 for seconds in idle[size]]):.2f}"] for size in IDLE_SIZES],
    )


def filled(url: str, halves: int, undecided_every: int) -> PostgresBroker:
    prepared(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_FILL, [halves, undecided_every])
        connection.execute("ANALYZE outbox.commit_log, outbox.op_log")
    return PostgresBroker(BrokerDatabase(conninfo=url), check=CheckSettings())


def resolve(url: str) -> float:
    """Seconds from the first scan to the last answer applied."""
    broker = filled(url, HALVES, UNDECIDED_EVERY)
    started = time.perf_counter()
    committed = 0
    while committed < HALVES // UNDECIDED_EVERY:
        committed += CheckBack(broker, "bench", Committed()).run_once().committed
    seconds = time.perf_counter() - started
    broker.close()
    return seconds


def idle_pass(url: str, halves: int) -> float:
    """Seconds of one pass when everything is decided and scanned already."""
    broker = filled(url, halves, halves + 1)
    check_back = CheckBack(broker, "bench", Committed())
    while check_back.run_once().claimed:
        pass
    for _ in range(20):
        check_back.run_once()
    started = time.perf_counter()
    for _ in range(20):
        check_back.run_once()
    seconds = (time.perf_counter() - started) / 20
    broker.close()
    return seconds


if __name__ == "__main__":
    main()
