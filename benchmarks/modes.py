"""The three modes compared: draining a FIFO topic of a thousand keys with a no-op handler.

The cost of the FIFO hold is in the benchmark `bulk`: its last two rows differ in nothing else.
"""

from __future__ import annotations

from benchmarks.bulk import FIFO, MESSAGES, drain_alone
from benchmarks.harness import REPEATS, Spread, server, table
from outbox.broker import embedded
from outbox.subscription import Mode

BATCHES = (1, 100)


def main() -> None:
    print(f"\nmodes: draining {MESSAGES:,} messages over 1,000 keys, one process, {REPEATS} runs")
    rates: dict[tuple[Mode, int], list[float]] = {(mode, batch): [] for batch in BATCHES for mode in Mode}
    with server() as url:
        for run in range(REPEATS):
            for mode, batch in rates:
                database = embedded.create_database(url, f"modes_{run}_{mode}_{batch}")
                rate, _ = drain_alone(database, FIFO, "--mode", mode, "--batch", str(batch))
                rates[mode, batch].append(rate)
    table(
        "draining by mode",
        ["mode", "batch", "messages/s (median, low to high)", "ratio to concurrent"],
        [
            [
                str(mode),
                str(batch),
                f"{Spread.of(found)}",
                f"{Spread.of([a / b for a, b in zip(found, rates[Mode.CONCURRENT, batch], strict=True)]):.2f}",
            ]
            for (mode, batch), found in rates.items()
        ],
    )


if __name__ == "__main__":
    main()
