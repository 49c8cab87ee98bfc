"""Storms one after the other, or a kept history again. It exits with 1 if a rule was broken.

python -m tests.oracle --total 180              as many storms as fit into three minutes
python -m tests.oracle --seed 7 --storms 1      this storm
python -m tests.oracle --check var/oracle/storm7  what the rules say about a history that was kept
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.oracle import lines
from tests.oracle.checker import Tables, check
from tests.oracle.server import Server
from tests.oracle.storm import Outcome, Plan, Storm

KEPT = Path("var/oracle")


def main() -> int:
    """Run storms until the time is over, and print a line for each."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total", type=float, default=600, help="begin no storm that would end after so many seconds")
    parser.add_argument("--storms", type=int, default=10_000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=45, help="how long clients and faults last in a storm")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="the seed of the first storm")
    parser.add_argument("--path", choices=["atomic", "two-phase"], help="only this path")
    parser.add_argument("--celery", action="store_true", help="only workers of Celery")
    parser.add_argument("--keep", type=Path, help="keep every history in this folder, not only those with a violation")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="check the history in this folder again")
    options = parser.parse_args()
    if options.check is not None:
        return 1 if report(*kept(options.check)) else 0
    until = time.monotonic() + options.total
    seconds = min(options.seconds, options.total / 6)
    print(f"seeds from {options.seed}", flush=True)
    broken = histories = 0
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="oracle-", ignore_cleanup_errors=True) as made:
        server = Server(Path(made) / "server")
        try:
            for seed in range(options.seed, options.seed + options.storms):
                began = time.monotonic()
                if began + longest > until:
                    break
                plan = Plan(
                    seed=seed,
                    path=options.path or ("atomic", "two-phase")[seed % 2],
                    celery=options.celery or seed // 2 % 2 == 1,
                    seconds=seconds,
                    faults=not options.no_faults,
                )
                storm = Storm(plan, Path(made) / f"storm{seed}", server)
                outcome = storm.run()
                problems = judged(outcome)
                broken += len(problems)
                histories += outcome.histories
                report(outcome, problems)
                if problems or options.keep:
                    folder = keep(outcome, problems, options.keep or KEPT)
                    print(f"  kept; again: python -m tests.oracle --check {folder}", flush=True)
                storm.drop()
                longest = max(longest, time.monotonic() - began)
        finally:
            server.stop()
    print(f"{histories} histories, {broken} violations", flush=True)
    return 1 if broken else 0


def judged(outcome: Outcome) -> list[str]:
    """What the checker says, and whether all came to rest."""
    problems = check(outcome.lines, outcome.tables)
    return problems if outcome.settled else ["settled: effects were missing when the quiet was over", *problems]


def report(outcome: Outcome, problems: list[str]) -> int:
    """Print one storm, and return how many violations it had."""
    plan = outcome.plan
    events = Counter(line["event"] for line in outcome.lines)
    kinds = Counter(line["kind"] for line in outcome.lines if line["event"] == "fault")
    faults = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(
        f"storm {plan.seed} ({plan.path}, {'celery' if plan.celery else 'outbox_worker'}): {outcome.histories} "
        f"histories, {len(outcome.tables.orders)} rows of {events['try']}, {len(outcome.tables.effects)} effects of "
        f"{events['begin']} calls, {events['status']} statuses; {faults}",
        flush=True,
    )
    for sentence in problems[:40]:
        print(f"  {sentence}", flush=True)
    return len(problems)


def keep(outcome: Outcome, problems: list[str], where: Path) -> Path:
    """Keep the lines, the tables and the logs of a storm; return their folder."""
    folder = where / outcome.folder.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(outcome.folder, folder, ignore=shutil.ignore_patterns("dumps"))
    tables = {
        "orders": sorted(outcome.tables.orders),
        "effects": list(outcome.tables.effects),
        "bookings": outcome.tables.bookings,
    }
    found = {"plan": vars(outcome.plan), "settled": outcome.settled, "tables": tables}
    (folder / "outcome.json").write_text(json.dumps(found), encoding="utf-8")
    (folder / "violations.txt").write_text("\n".join(problems), encoding="utf-8")
    return folder


def kept(folder: Path) -> tuple[Outcome, list[str]]:
    """A storm that was kept, and what the checker says about it now."""
    found = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    tables = Tables(
        orders=set(found["tables"]["orders"]),
        effects=[(group, name, number) for group, name, number in found["tables"]["effects"]],
        bookings={name: (one[0], one[1], one[2]) for name, one in found["tables"]["bookings"].items()},
    )
    read = list(lines.read(folder / "lines"))
    outcome = Outcome(Plan(**found["plan"]), read, tables, folder, settled=found["settled"])
    return outcome, judged(outcome)


if __name__ == "__main__":
    sys.exit(main())
