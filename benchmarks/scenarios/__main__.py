"""Run every scenario with every system, and print one table. OUTBOX_BENCH_STORE=1 stores it in benchmarks/results.

python -m benchmarks.scenarios [--seconds 20] [--rate 100] [--workers 4] [--rounds 1]
python -m benchmarks.scenarios --scenario restart --system pgmq --logs var/scenarios
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.harness import Spread, table
from benchmarks.scenarios.cell import CONTESTANTS, RECOVERY_SECONDS, Contestant, Load, Outcome, Server, server
from benchmarks.scenarios.faults import HELD, SCENARIOS, Scenario

HEADER = (
    *("scenario", "system", "rate/s", "during/s", "recovered/s", "p99 ms"),
    *("lost", "effects twice", "dead rows per 100", "reaches the rate"),
)
DEAD_ROWS = ("system", "table", "dead rows per 100")
# A system reaches the rate if so large a share of it arrives.
_REACHED = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="load of a scenario; the last 10 are without a fault")
    parser.add_argument("--rate", type=float, default=100, help="transactions per second; high load is twice as much")
    parser.add_argument("--workers", type=int, default=4, help="concurrency of the worker")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scenario", action="append", default=[], help="only those whose name contains this")
    parser.add_argument("--system", action="append", default=[], help="only those whose name contains this")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--remark", default="", help="added to the title of the table")
    options = parser.parse_args()
    if options.seconds <= RECOVERY_SECONDS:
        parser.error(f"--seconds: more than {RECOVERY_SECONDS:g} are needed, the last ones are without a fault")
    scenarios = [one for one in SCENARIOS if _wanted(one.name, options.scenario)]
    systems = [one for one in CONTESTANTS if _wanted(one.name, options.system)]
    load = Load(options.rate, options.seconds, options.workers)
    with contextlib.ExitStack() as stack:
        servers = {
            system: stack.enter_context(server(system, load, options.logs))
            for system in systems
            if not system.left_out()
        }
        measure(scenarios, systems, servers, options.rounds, options.remark)


def _wanted(name: str, texts: Sequence[str]) -> bool:
    return not texts or any(text in name for text in texts)


def measure(
    scenarios: Sequence[Scenario],
    systems: Sequence[Contestant],
    servers: dict[Contestant, Server],
    rounds: int,
    remark: str,
) -> None:
    """The systems take turns within a scenario. What was measured until now is stored after each scenario."""
    found: dict[tuple[Scenario, Contestant], list[Outcome]] = {}
    for run in range(rounds):
        for number, scenario in enumerate(scenarios):
            for system, its in servers.items():
                outcome = its.measure(scenario, f"run_{run}_{number}")
                found.setdefault((scenario, system), []).append(outcome)
                print(f"{scenario.name}, {system.name}: {outcome}", flush=True)
            title, rows = _title(servers, rounds, remark), _rows(scenarios, systems, servers, found)
            by_table = [row for (one, system), its in found.items() if one is HELD for row in dead_rows(system, its)]
            tables = [
                {"title": title, "header": list(HEADER), "rows": rows},
                {"title": "Dead rows while the snapshot is held", "header": list(DEAD_ROWS), "rows": by_table},
            ]
            if os.environ.get("OUTBOX_BENCH_STORE"):
                results.store_tables("scenarios", [one for one in tables if one["rows"]], rounds=rounds)
    # The harness would store it again, under another name.
    os.environ.pop("OUTBOX_BENCH_STORE", None)
    table(title, HEADER, rows)
    if by_table:
        table("Dead rows while the snapshot is held", DEAD_ROWS, by_table)


def _title(servers: dict[Contestant, Server], rounds: int, remark: str) -> str:
    load = next(iter(servers.values())).load
    versions = ", ".join(f"{system.name} {its.version}" for system, its in servers.items())
    sizes = f"{load.rate:g} messages/s for {load.seconds:g} s per scenario, {load.workers} workers"
    return "; ".join(part for part in (sizes, versions, remark) if part)


def _rows(
    scenarios: Sequence[Scenario],
    systems: Sequence[Contestant],
    servers: dict[Contestant, Server],
    found: dict[tuple[Scenario, Contestant], list[Outcome]],
) -> list[list[str]]:
    rows = []
    for scenario in scenarios:
        for system in systems:
            if system.left_out():
                rows.append([scenario.name, system.name, *["not measured"] * 7, system.left_out()])
            elif outcomes := found.get((scenario, system)):
                rows.append(row(scenario, system, outcomes, servers[system].load.rate))
    return rows


def row(scenario: Scenario, system: Contestant, outcomes: Sequence[Outcome], rate: float) -> list[str]:
    """A row of the table; medians and spread if there are several rounds."""

    rates = [(one.before, one.during, one.recovered) for one in outcomes]
    lowest = Spread.of([before for before, _, _ in rates]).median
    reached = "yes" if lowest >= _REACHED * rate else f"no, {lowest:.0f} of {rate:.0f}/s"
    phantoms = sum(one.counted.phantoms for one in outcomes)
    return [
        scenario.name,
        system.name,
        *(_cell(values) for values in zip(*rates, strict=True)),
        _cell([one.counted.p99_ms for one in outcomes]),
        _cell([one.counted.lost for one in outcomes]),
        _cell([one.counted.twice for one in outcomes]),
        _cell([one.dead_rows.total() for one in outcomes]),
        reached + (f"; {phantoms} effects without an order" if phantoms else ""),
    ]


def dead_rows(system: Contestant, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for each table of the system in which dead rows stay; medians and spread if there are several rounds."""
    names = {name for outcome in outcomes for name in outcome.dead_rows}
    rows = {name: [outcome.dead_rows[name] for outcome in outcomes] for name in names}
    most = sorted(rows, key=lambda name: (-sum(rows[name]), name))
    return [[system.name, name, _cell(rows[name], ",.1f")] for name in most]


def _cell(values: Sequence[float], spec: str = ",.0f") -> str:
    return f"{Spread.of(values):{spec}}" if len(values) > 1 else f"{values[0]:{spec}}"


if __name__ == "__main__":
    main()
