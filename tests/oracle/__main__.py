"""Storms one after the other: `python -m tests.oracle --minutes 10`. It exits with 1 if a rule was broken."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.oracle.checker import check
from tests.oracle.server import Server
from tests.oracle.storm import Outcome, Plan, Storm


def main() -> int:
    """Run storms until the time is over, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--storms", type=int, default=10_000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=45, help="how long clients and faults last in a storm")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000, help="the seed of the first storm")
    parser.add_argument("--path", choices=["atomic", "two-phase"], help="only this path")
    parser.add_argument("--celery", action="store_true", help="only workers of Celery")
    parser.add_argument("--keep", type=Path, help="keep lines and logs in this folder")
    parser.add_argument("--no-faults", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.minutes * 60
    # A storm needs about a minute beside its clients' time.
    longest = options.seconds + 60
    broken = histories = 0
    with tempfile.TemporaryDirectory(prefix="oracle-", ignore_cleanup_errors=True) as made:
        folder = options.keep or Path(made)
        server = Server(Path(made) / "server")
        try:
            for number in range(options.storms):
                if number and time.monotonic() + longest > until:
                    break
                seed = options.seed + number
                plan = Plan(
                    seed=seed,
                    path=options.path or ("atomic", "two-phase")[seed % 2],
                    celery=options.celery or seed // 2 % 2 == 1,
                    seconds=options.seconds,
                    faults=not options.no_faults,
                )
                one = Storm(plan, folder / f"storm{seed}", server)
                outcome = one.run()
                problems = judged(outcome)
                broken += len(problems)
                histories += report(outcome, problems)
                if problems:
                    save(outcome, problems)
                elif options.keep is None:
                    one.drop()
        finally:
            server.stop()
    print(f"{histories} histories, {broken} violations", flush=True)
    return 1 if broken else 0


def judged(outcome: Outcome) -> list[str]:
    """What the checker says, and whether all came to rest."""
    problems = check(outcome.lines, outcome.tables)
    return problems if outcome.settled else ["settled: effects were missing when the quiet was over", *problems]


def report(outcome: Outcome, problems: list[str]) -> int:
    """Print one storm, and return how many histories it had."""
    plan = outcome.plan
    events = Counter(line["event"] for line in outcome.lines)
    kinds = Counter(line["kind"] for line in outcome.lines if line["event"] == "fault")
    faults = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(
        f"storm {plan.seed} ({plan.path}, {'celery' if plan.celery else 'outbox_worker'}): {events['history']} "
        f"histories, {len(outcome.tables.orders)} rows of {events['try']}, {len(outcome.tables.effects)} effects of "
        f"{events['begin']} calls, {events['status']} statuses; {faults}",
        flush=True,
    )
    for sentence in problems[:40]:
        print(f"  {sentence}", flush=True)
    return events["history"]


def save(outcome: Outcome, problems: list[str]) -> None:
    """Keep what a violation needs to be understood."""
    tables = {
        "orders": sorted(outcome.tables.orders),
        "effects": list(outcome.tables.effects),
        "bookings": outcome.tables.bookings,
    }
    (outcome.folder / "tables.json").write_text(json.dumps(tables), encoding="utf-8")
    (outcome.folder / "violations.txt").write_text("\n".join(problems), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
